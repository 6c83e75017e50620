// The address holds the whole state: #/run/NAME/trajectories/FILE/PLACE/TAB?filter=...&sort=...

/** What the address says now: {path: [...], query: {...}}. */
export function route() {
  const [path, query] = location.hash.replace(/^#\/?/, "").split("?");
  return {
    path: path.split("/").filter(Boolean).map(decoded),
    query: Object.fromEntries(new URLSearchParams(query || "")),
  };
}

function decoded(text) {
  try {
    return decodeURIComponent(text);
  } catch {
    return text;
  }
}

/** An address. */
export function address(path, query = {}) {
  const kept = Object.entries(query).filter(([, value]) => value !== "" && value !== null && value !== undefined);
  const tail = kept.length ? `?${new URLSearchParams(kept)}` : "";
  return `#/${path.map((part) => encodeURIComponent(part)).join("/")}${tail}`;
}

/** Go there; `isQuiet` leaves no mark in the browser's history. */
export function go(path, query = {}, isQuiet = false) {
  const there = address(path, query);
  if (there === location.hash) return;
  if (!isQuiet) location.hash = there;
  else {
    history.replaceState(null, "", there);
    window.dispatchEvent(new HashChangeEvent("hashchange"));
  }
}
