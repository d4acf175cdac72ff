// What an answer consists of: reasoning, text, and calls of tools. Each is a component, which shows its field of the node
// (`take` in run.js fills it).

import { addFiles } from "./composer.js";
import { Component, copyText, html, Widget } from "./html.js";
import { toHtml } from "./markdown.js";
import { app } from "./store.js";

export function Parts({ node }) {
  const { text, reasoning, calls = [], files = [] } = node;
  const growing = node.state === "streaming";
  if (node.exchange.task && node.exchange.task !== "chat") {
    return html`
      ${text && html`<p class="plain">${text}</p>`}
      ${files.map((file, index) => html`<${Made} key=${file} file=${file} whole=${node.state === "done"} name=${`${node.exchange.task}-${index + 1}`} />`)}
      ${growing && (node.progress === undefined ? html`<${Waiting} />` : html`<${Progress} ...${node} />`)}
    `;
  }
  return html`
    ${reasoning && html`<${Reasoning} text=${reasoning} growing=${growing} open=${!text && !calls.length} />`}
    <${Text} text=${text} growing=${growing} />
    ${calls.map((call) => html`<${Call} key=${call.id} name=${call.function.name} text=${call.function.arguments} />`)}
  `;
}

// It is open until something else comes; then it is folded away.
function Reasoning({ text, growing, open }) {
  return html`<details class="reasoning" open=${open}>
    <summary>Reasoning</summary>
    <${Text} text=${text} growing=${growing} />
  </details>`;
}

function Call({ name, text }) {
  return html`<figure class="call">
    <figcaption>Calls <code>${name}</code></figcaption>
    <pre>${pretty(text)}</pre>
  </figure>`;
}

// JSON with a line for each member; as it came while it is not complete.
function pretty(text) {
  try {
    return JSON.stringify(JSON.parse(text), null, 2);
  } catch {
    return text;
  }
}

export function Waiting() {
  return html`<p class="thinking" aria-label="Waiting"><i></i><i></i><i></i></p>`;
}

function Progress({ progress, stage }) {
  return html`<p class="progress"><progress max="100" value=${progress} aria-label="Progress"></progress> ${`${progress} % · ${stage}`}</p>`;
}

// A picture or video that the model made.
class Made extends Component {
  url = URL.createObjectURL(this.props.file);

  componentWillUnmount() {
    URL.revokeObjectURL(this.url);
  }

  render({ file, name, whole }) {
    const [kind, format] = file.type.split("/");
    const made = kind === "video" ? html`<video src=${this.url} aria-label="What the model made" controls loop muted></video>` : html`<img src=${this.url} alt="What the model made" />`;
    return html`<figure class="made">
      ${made}
      ${whole &&
      html`<figcaption class="actions">
        <a class="quiet" href=${this.url} download=${`${name}.${format}`}>Download</a>
        ${kind === "image" &&
        app.model?.runtime.takes.includes("image") &&
        html`<button type="button" class="quiet" onClick=${() => addFiles([file])}>Attach</button>`}
      </figcaption>`}
    </figure>`;
  }
}

// What tools returned for the calls of an answer.
export function Results({ results }) {
  return results.map(
    ({ id, name, text }) =>
      html`<figure key=${id} class="call">
        <figcaption><code>${name}</code> returned</figcaption>
        <pre>${pretty(text)}</pre>
      </figure>`,
  );
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
