// Markdown to safe HTML. Answers may quote anything, so DOMPurify removes all that could run or ask other servers.

import createDOMPurify from "../vendor/purify.es.mjs";
import { Marked } from "../vendor/marked.esm.js";

const marked = new Marked({ gfm: true, breaks: true });

createDOMPurify.addHook("afterSanitizeAttributes", (node) => {
  if (node.tagName === "A") {
    node.setAttribute("target", "_blank");
    node.setAttribute("rel", "noopener noreferrer");
  }
  if (node.tagName === "PRE" || node.tagName === "TABLE") node.setAttribute("tabindex", "0"); // to scroll by keyboard
  if (node.tagName === "INPUT") node.setAttribute("aria-label", node.checked ? "done" : "to do"); // of a task list
});

const OPTIONS = {
  RETURN_TRUSTED_TYPE: true,
  FORBID_TAGS: ["style", "form", "button", "select", "textarea", "audio", "video", "svg", "math"],
  FORBID_ATTR: ["style", "class", "id", "name"],
};

export function toHtml(text) {
  return createDOMPurify.sanitize(marked.parse(text), OPTIONS);
}
