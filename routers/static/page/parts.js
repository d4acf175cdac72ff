// What an answer consists of. So far it is text; a kind that the server learns (reasoning, a tool call) is another
// component here, which shows its field of the node (`take` in run.js fills it).

import { copyText, html, Widget } from "./html.js";
import { toHtml } from "./markdown.js";

export function Parts({ node }) {
  return html`<${Text} text=${node.text} growing=${node.state === "streaming"} />`;
}

// Markdown. Text that grows is translated anew for a fifth of the time at most, however long it is.
export class Text extends Widget {
  shown = "";
  due = 0;

  shouldComponentUpdate({ text, growing }) {
    return text !== this.shown && !(growing && performance.now() < this.due);
  }

  render({ text }) {
    const started = performance.now();
    const safe = toHtml(text);
    this.due = performance.now() + 4 * (performance.now() - started);
    this.shown = text;
    return html`<div class="markdown" ref=${this.ref} dangerouslySetInnerHTML=${{ __html: safe }}></div>`;
  }

  componentDidMount() {
    this.addCopyButtons();
  }

  componentDidUpdate() {
    this.addCopyButtons();
  }

  addCopyButtons() {
    for (const pre of this.element.querySelectorAll("pre")) {
      const button = document.createElement("button");
      button.type = "button";
      button.className = "copy-code";
      button.textContent = "Copy";
      button.addEventListener("click", async () => {
        await copyText(pre.querySelector("code").textContent);
        button.textContent = "Copied";
      });
      pre.append(button);
    }
  }
}
