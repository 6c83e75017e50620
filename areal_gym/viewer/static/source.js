// The source of the data: the server, or the data inside an exported page.

class Server {
  isLive = true;

  changes(cursor) { return ask(`/api/listing?since=${encodeURIComponent(cursor)}`); }
  evaluations() { return ask("/api/evaluations"); }
  evaluation(id) { return ask(`/api/evaluations/${encodeURIComponent(id)}`); }
  samples(id, start, limit) { return ask(`/api/evaluations/${encodeURIComponent(id)}/samples?start=${start}&limit=${limit}`); }
  async sample(id, place) {
    const row = await ask(`/api/evaluations/${encodeURIComponent(id)}/samples/${place}`);
    return { ...row, pictureOf: (sha256) => `/api/evaluations/${encodeURIComponent(id)}/images/${sha256}` };
  }
  annotate(run, notes) { return tell(`/api/runs/${encodeURIComponent(run)}/notes`, notes); }
  remove(run) { return tell(`/api/runs/${encodeURIComponent(run)}/delete`, {}); }
  about(run) { return ask(`/api/runs/${encodeURIComponent(run)}`); }
  pulse(run) { return ask(`/api/runs/${encodeURIComponent(run)}/pulse`); }
  curves(run, after = 0) { return ask(`/api/runs/${encodeURIComponent(run)}/curves?after=${after}`); }
  rows(run, file, start, limit) { return ask(`${this.#file(run, file)}?start=${start}&limit=${limit}`); }
  search(run, file, text) { return ask(`${this.#file(run, file)}/search?q=${encodeURIComponent(text)}`); }
  async detail(run, file, place) {
    const row = await ask(`${this.#file(run, file)}/${place}`);
    return { ...row, pictureOf: (sha256) => `/api/runs/${encodeURIComponent(run)}/images/${sha256}` };
  }

  #file(run, file) {
    return `/api/runs/${encodeURIComponent(run)}/${encodeURIComponent(file)}`;
  }
}

function tell(path, body) {
  return ask(path, { method: "POST", headers: { "content-type": "application/json" }, body: JSON.stringify(body) });
}

async function ask(path, options = {}) {
  let answer;
  try {
    answer = await fetch(path, options);
  } catch {
    throw new Error("the viewer's server does not answer: has `areal-gym view` ended?");
  }
  const isJson = (answer.headers.get("content-type") || "").includes("json");
  const found = isJson ? await answer.json() : { error: await answer.text() };
  if (!answer.ok) throw new Error([found.error, ...(found.hints || [])].join("\n"));
  return found;
}

class Exported {
  isLive = false;
  #data;
  #chunks = new Map();

  constructor(text) { this.#data = JSON.parse(text); }

  async changes() {
    return { cursor: "", is_whole: true, cards: this.#data.runs.map((run) => run.about.card), gone: [], num_unread: 0, is_read_only: true };
  }
  async about(run) { return this.#run(run).about; }
  async curves(run) { return this.#run(run).curves; } // all of them: nothing comes after
  async rows(run, file) {
    const found = this.#run(run).rows[file];
    if (!found) throw new Error(`${run} has no trajectories '${file}' in this file`);
    return found;
  }

  async evaluations() { return this.#data.evaluations.map((one) => one.about); }
  async evaluation(id) { return this.#evaluation(id).about; }
  async samples(id) { return this.#evaluation(id).samples; }

  async sample(id, place) {
    const one = this.#evaluation(id);
    const row = (await this.#chunkOf(one.chunk))[place];
    if (!row) throw new Error(`${id} has no sample ${place} in this file`);
    return { ...row, texts: one.texts, pictureOf: (sha256) => row.pictures?.[sha256] };
  }

  async search(run, file, text) {
    const needle = text.toLowerCase();
    const found = [];
    (await this.#chunk(run, file)).forEach((row, place) => {
      const { spans, texts, trained, pictures, ...head } = row;
      if (JSON.stringify(head).toLowerCase().includes(JSON.stringify(needle).slice(1, -1))) found.push(place);
    });
    return found;
  }

  async detail(run, file, place) {
    const row = (await this.#chunk(run, file))[place];
    if (!row) throw new Error(`${file} has no trajectory ${place} in this file`);
    return { ...row, texts: this.#run(run).texts, pictureOf: (sha256) => row.pictures?.[sha256] };
  }

  #run(name) {
    const found = this.#data.runs.find((run) => run.about.card.name === name);
    if (!found) throw new Error(`no run ${name} in this file`);
    return found;
  }

  #evaluation(id) {
    const found = this.#data.evaluations.find((one) => one.about.id === id);
    if (!found) throw new Error(`no evaluation ${id} in this file`);
    return found;
  }

  #chunk(run, file) { return this.#chunkOf(this.#run(run).chunks[file]); }

  #chunkOf(id) {
    if (!this.#chunks.has(id)) this.#chunks.set(id, unpacked(document.getElementById(id).textContent));
    return this.#chunks.get(id);
  }
}

async function unpacked(text) {
  const bytes = Uint8Array.from(atob(text), (character) => character.charCodeAt(0));
  const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("gzip"));
  return JSON.parse(await new Response(stream).text());
}

const inlined = document.getElementById("data");

/** The one source of this page. */
export const source = inlined ? new Exported(inlined.textContent) : new Server();

/** All rows of a file, as columns; called after each page of them with what there is so far. */
export async function allRows(run, file, onPage) {
  let all = null;
  for (;;) {
    const page = await source.rows(run, file, all ? all.length : 0, all ? 5000 : 500); // soon, then the rest
    if (all === null) all = { ...page.columns, length: page.columns.id.length };
    else {
      for (const name of Object.keys(page.columns)) all[name] = all[name].concat(page.columns[name]);
      all.length += page.columns.id.length;
    }
    onPage(all, page.is_last);
    if (page.is_last) return all;
  }
}
