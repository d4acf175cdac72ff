// A turn of the chat: a user's message, results of tools, or answers side by side, with what can be done about them.

import { besides, branches, choose, stepBranch } from "./chats.js";
import { Attachment, Component, html, Widget } from "./html.js";
import { CopyButton, Inspector } from "./inspect.js";
import { Parts, Results, Text } from "./parts.js";
import { isRunning, regenerate, resend, sendResults, speed, wholeCalls } from "./run.js";
import { app, changed, saveChat } from "./store.js";

export function Turn({ chat, node }) {
  if (node.role === "user") {
    return app.editing === node.id
      ? html`<${Editor} key=${node.id} node=${node} />`
      : html`<${UserMessage} chat=${chat} node=${node} />`;
  }
  if (node.role === "tool") {
    return app.editing === node.id
      ? html`<${ResultsForm} key=${node.id} chat=${chat} node=${chat.nodes[node.parent]} results=${node.results} />`
      : html`<${ToolMessage} chat=${chat} node=${node} />`;
  }
  const group = besides(chat, node);
  return html`<div class=${group.length > 1 ? "turn columns" : "turn"}>
    ${group.map(
      (one) =>
        html`<${Answer}
          key=${one.id}
          chat=${chat}
          node=${one}
          version=${one.version}
          name=${group.length > 1 ? nameOf(one, group) : ""}
          chosen=${one === node}
          last=${!chat.active[one.id]}
          branch=${branchOf(chat, node)}
          busy=${isRunning(chat)}
        />`,
    )}
  </div>`;
}

// "A" or "B" by the settings, with a number if one of them was asked for several choices.
function nameOf(node, group) {
  const several = group.filter((other) => other.lane === node.lane).length > 1;
  return several ? `${node.lane}${node.index + 1}` : node.lane;
}

// Which branch is shown, and of how many: "2/3".
function branchOf(chat, node) {
  const groups = branches(chat, node);
  return groups.length > 1 ? `${groups.findIndex((group) => group.includes(node)) + 1}/${groups.length}` : "";
}

function BranchButtons({ chat, node, branch }) {
  if (!branch) return null;
  const [at, of] = branch.split("/").map(Number);
  const step = (by) => {
    stepBranch(chat, node, by);
    saveChat(chat);
  };
  return html`<span class="branches" role="group" aria-label="Branches">
    <button type="button" class="quiet" disabled=${at === 1} onClick=${() => step(-1)} aria-label="Branch before">‹</button>
    <span>${branch}</span>
    <button type="button" class="quiet" disabled=${at === of} onClick=${() => step(1)} aria-label="Next branch">›</button>
  </span>`;
}

function EditButton({ chat, node }) {
  const edit = () => {
    app.editing = node.id;
    changed();
  };
  return html`<button type="button" class="quiet" disabled=${isRunning(chat)} onClick=${edit}>Edit</button>`;
}

function UserMessage({ chat, node }) {
  return html`<article class="user" aria-label="You">
    <div class="bubble">
      ${node.images.map((url) => html`<${Attachment} url=${url} alt="What you attached" />`)}
      <${Text} text=${node.text} />
    </div>
    <div class="actions">
      <${BranchButtons} chat=${chat} node=${node} branch=${branchOf(chat, node)} />
      <${CopyButton} text=${() => node.text} />
      <${EditButton} chat=${chat} node=${node} />
    </div>
  </article>`;
}

function ToolMessage({ chat, node }) {
  return html`<article class="user" aria-label="Results of tools">
    <div class="bubble"><${Results} results=${node.results} /></div>
    <div class="actions">
      <${BranchButtons} chat=${chat} node=${node} branch=${branchOf(chat, node)} />
      <${EditButton} chat=${chat} node=${node} />
    </div>
  </article>`;
}

class Editor extends Widget {
  componentDidMount() {
    const area = this.element.querySelector("textarea");
    area.focus();
    area.setSelectionRange(area.value.length, area.value.length);
  }

  close = () => {
    app.editing = "";
    changed();
  };

  submit = (event) => {
    event.preventDefault();
    const text = this.element.querySelector("textarea").value;
    this.close();
    resend(this.props.node, text);
  };

  onKey = (event) => {
    if (event.key === "Escape") {
      event.stopPropagation();
      this.close();
    }
    if (event.key === "Enter" && !event.shiftKey && !event.isComposing) this.submit(event);
  };

  render({ node }) {
    return html`<form class="user editor" ref=${this.ref} onSubmit=${this.submit}>
      <textarea aria-label="Edit the message" rows="3" defaultValue=${node.text} onKeyDown=${this.onKey}></textarea>
      <div class="actions">
        <button type="button" onClick=${this.close}>Cancel</button>
        <button class="primary">Send as a branch</button>
      </div>
    </form>`;
  }
}

// Asks what the calls of an answer returned; `results` are those that are edited, if any.
class ResultsForm extends Widget {
  cancel = () => {
    app.editing = "";
    changed();
  };

  submit = (event) => {
    event.preventDefault();
    const texts = Array.from(this.element.querySelectorAll("textarea"), (area) => area.value);
    app.editing = "";
    sendResults(this.props.chat, this.props.node, texts);
  };

  render({ chat, node, results }) {
    return html`<form class="results" ref=${this.ref} onSubmit=${this.submit}>
      ${wholeCalls(node).map(
        (call, index) =>
          html`<div key=${call.id} class="field">
            <label for=${`result-${call.id}`}>Result of ${call.function.name}</label>
            <textarea id=${`result-${call.id}`} rows="2" spellcheck=${false} defaultValue=${results?.[index].text}></textarea>
          </div>`,
      )}
      <div class="actions">
        ${results && html`<button type="button" onClick=${this.cancel}>Cancel</button>`}
        <button class="primary" disabled=${isRunning(chat)}>${results ? "Send as a branch" : "Send results"}</button>
      </div>
    </form>`;
  }
}

class Answer extends Component {
  state = { inspected: false };

  shouldComponentUpdate(next, state) {
    const watched = ["node", "version", "name", "chosen", "last", "branch", "busy"];
    return state.inspected !== this.state.inspected || watched.some((name) => next[name] !== this.props[name]);
  }

  inspect = () => this.setState({ inspected: !this.state.inspected });

  render({ chat, node, name, chosen, last, branch, busy, version }, { inspected }) {
    const going = node.state === "waiting" || node.state === "streaming";
    const keep = () => {
      choose(chat, node);
      saveChat(chat);
    };
    return html`<article class=${`answer ${node.state} ${chosen ? "chosen" : ""}`} aria-label=${`Answer ${name}`} aria-busy=${going}>
      ${name &&
      html`<header>
        <span class="name">${name}</span>
        ${chosen
          ? html`<span class="kept">the chat goes on with this one</span>`
          : html`<button type="button" class="quiet" disabled=${busy} onClick=${keep}>Go on with this one</button>`}
      </header>`}
      ${node.state === "waiting" && html`<p class="thinking" aria-label="Waiting"><i></i><i></i><i></i></p>`}
      <${Parts} node=${node} />
      ${node.error && html`<p class="error" role="alert">${node.error}</p>`}
      ${node.state === "stopped" && html`<p class="stopped">Stopped.</p>`}
      <${Figures} node=${node} />
      ${!going &&
      html`<div class="actions">
        ${chosen && html`<${BranchButtons} chat=${chat} node=${node} branch=${branch} />`}
        ${node.text && html`<${CopyButton} text=${() => node.text} />`}
        <button type="button" class="quiet" disabled=${busy} onClick=${() => regenerate(node)}>Regenerate</button>
        <button type="button" class="quiet" aria-expanded=${inspected} onClick=${this.inspect}>Inspect</button>
      </div>`}
      ${inspected && html`<${Inspector} node=${node} version=${version} />`}
      ${chosen && last && !going && wholeCalls(node).length > 0 && html`<${ResultsForm} chat=${chat} node=${node} />`}
    </article>`;
  }
}

// Time to the first token, tokens a second, and what the server says of the tokens.
function Figures({ node }) {
  const { times, usage, facts } = node;
  if (node.exchange.task && node.exchange.task !== "chat") {
    if (!times.last) return null;
    const shown = Object.entries({ ...facts, time: seconds(times.last) });
    return html`<dl class="figures">${shown.map(([name, value]) => html`<div><dt>${name}</dt><dd>${value}</dd></div>`)}</dl>`;
  }
  if (times.first === undefined) return null;
  const cached = usage?.prompt_tokens_details?.cached_tokens;
  return html`<dl class="figures">
    <div title="From sending the request to the first token"><dt>first token</dt><dd>${seconds(times.first)}</dd></div>
    ${speed(node) > 0 && html`<div title="From the first token to the last"><dt>tokens/s</dt><dd>${speed(node).toFixed(1)}</dd></div>`}
    <div><dt>tokens</dt><dd>${node.count}</dd></div>
    ${usage && html`<div><dt>prompt</dt><dd>${usage.prompt_tokens}</dd></div>`}
    ${cached !== undefined && html`<div title="Tokens of the prompt whose KV blocks were cached"><dt>cached</dt><dd>${cached}</dd></div>`}
    ${node.finish && html`<div title="Why the answer ended"><dt>end</dt><dd>${node.finish}</dd></div>`}
  </dl>`;
}

function seconds(ms) {
  return ms < 1000 ? `${Math.round(ms)} ms` : `${(ms / 1000).toFixed(2)} s`;
}
