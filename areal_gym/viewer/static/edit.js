// The dialog of a run: its tags, its note, and how it is deleted.
import { h, fill, shown } from "./dom.js";
import { source } from "./source.js";

/** Ask for changes of a run; resolves to true once something has been saved. */
export function editRun(card) {
  const tags = h("input", { type: "text", value: card.tags.join(", "), "aria-label": "tags", spellcheck: false, placeholder: "baseline, lr-sweep" });
  const note = h("textarea", { rows: "6", "aria-label": "note" }, card.note);
  const trouble = h("p.trouble", { hidden: true, role: "alert" });
  const dialog = h("dialog.edit", { "aria-label": `tags and note of ${card.name}`, onclick: (event) => event.target === dialog && dialog.close() });
  const actions = h("div.bar");
  let isSaved = false;

  async function attempt(change) {
    try {
      await change();
      isSaved = true;
      dialog.close();
    } catch (error) {
      fill(trouble, shown(error.message));
      trouble.hidden = false;
    }
  }

  function drawActions() {
    const remove = h("button.danger", { type: "button", onclick: () => confirm() }, "delete …");
    fill(actions,
      card.status === "running" ? h("small", {}, "a running run cannot be deleted") : remove, h("span.spring"),
      h("button", { type: "button", onclick: () => dialog.close() }, "cancel"), h("button.on", { type: "submit" }, "save"));
  }

  function confirm() {
    const yes = h("button.danger", { type: "button", onclick: () => attempt(() => source.remove(card.name)) }, "delete");
    fill(actions, h("span", {}, "Delete this run with its trajectories and checkpoints? It is moved to .trash beside it."), h("span.spring"),
      h("button", { type: "button", onclick: () => drawActions() }, "keep"), yes);
    yes.focus();
  }

  const save = (event) => {
    event.preventDefault();
    attempt(() => source.annotate(card.name, { tags: tags.value.split(",").map((tag) => tag.trim()).filter(Boolean), note: note.value.trim() }));
  };
  drawActions();
  fill(dialog, h("form", { onsubmit: save },
    h("h2", {}, shown(card.name)), card.error ? h("p.reason", {}, shown(`${card.status}: ${card.error}`)) : null,
    h("label", {}, "Tags, separated by commas", tags), h("label", {}, "Note", note), trouble, actions));
  document.body.append(dialog);
  dialog.showModal();
  tags.focus();
  return new Promise((resolve) => dialog.addEventListener("close", () => { dialog.remove(); resolve(isSaved); }));
}
