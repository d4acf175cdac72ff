// What is behind an answer: its tokens and their probabilities, the request, the events, and commands to repeat it.

import { Component, copyText, html, Widget } from "./html.js";
import { asCurl, asJson, asPython } from "./snippets.js";
import { TASKS } from "./tasks.js";

const TABS = ["Tokens", "Request", "Events", "curl", "Python"];
const OTHERS = ["Request", "Events", "curl"]; // of what is no chat
const LONGEST = 2000; // characters of a text, such as an image's, that is shown whole

export class Inspector extends Widget {
  tabs = (this.props.node.exchange.task || "chat") === "chat" ? TABS : OTHERS;
  state = { tab: this.tabs[0] };

  shouldComponentUpdate(next, state) {
    return next.version !== this.props.version || state.tab !== this.state.tab;
  }

  // Arrow keys move between tabs, as in other tab lists.
  onKey = (event) => {
    const step = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
    if (!step) return;
    const { tabs } = this;
    const tab = tabs[(tabs.indexOf(this.state.tab) + step + tabs.length) % tabs.length];
    this.setState({ tab }, () => this.element.querySelector('[aria-selected="true"]').focus());
  };

  render({ node }, { tab }) {
    const id = `inspect-${node.id}`;
    return html`<section class="inspector" ref=${this.ref} aria-label="Behind this answer">
      <div role="tablist" aria-label="Views" onKeyDown=${this.onKey}>
        ${this.tabs.map(
          (name) =>
            html`<button
              type="button"
              role="tab"
              id=${`${id}-${name}`}
              aria-selected=${name === tab}
              aria-controls=${id}
              tabindex=${name === tab ? 0 : -1}
              onClick=${() => this.setState({ tab: name })}
            >
              ${name}
            </button>`,
        )}
      </div>
      <div role="tabpanel" id=${id} aria-labelledby=${`${id}-${tab}`} tabindex="0">${view(tab, node)}</div>
    </section>`;
  }
}

function view(tab, node) {
  const { request, events } = node.exchange;
  if (tab === "Tokens") return html`<${HeatMap} tokens=${node.tokens} />`;
  if (tab === "Events") return html`<${Listing} text=${events.map(({ at, data }) => `${at} ms  ${data}`).join("\n")} />`;
  const curl = (body) => asCurl(TASKS[node.exchange.task || "chat"].path(body), body);
  const text = { Request: asJson, curl, Python: asPython }[tab];
  return html`<${Listing} text=${text(shortened(request))} whole=${() => text(request)} />`;
}

// Replaces the bytes of images, which nobody reads; copies have them.
function shortened(value) {
  if (value instanceof Blob) return value;
  if (typeof value === "string") return value.length > LONGEST ? `${value.slice(0, 60)}…` : value;
  if (Array.isArray(value)) return value.map(shortened);
  if (value === null || typeof value !== "object") return value;
  return Object.fromEntries(Object.entries(value).map(([name, item]) => [name, shortened(item)]));
}

// Text with a button that copies it; `whole` returns what is copied if that is more.
function Listing({ text, whole = () => text }) {
  return html`<div class="listing">
    <${CopyButton} text=${whole} />
    <pre>${text}</pre>
  </div>`;
}

export class CopyButton extends Component {
  copy = async () => {
    await copyText(this.props.text());
    this.setState({ copied: true });
    setTimeout(() => this.setState({ copied: false }), 1500);
  };

  render({ label = "Copy" }, { copied }) {
    return html`<button type="button" class="quiet" onClick=${this.copy}>${copied ? "Copied" : label}</button>`;
  }
}

// The answer's tokens, coloured by their probabilities. The chosen token's alternatives are listed below.
class HeatMap extends Component {
  state = { chosen: 0 };

  choose = (event) => {
    const { index } = event.target.dataset;
    if (index !== undefined) this.setState({ chosen: Number(index) });
  };

  onKey = (event) => {
    const step = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
    if (!step) return;
    event.preventDefault();
    const chosen = Math.min(Math.max(this.state.chosen + step, 0), this.props.tokens.length - 1);
    this.setState({ chosen });
  };

  render({ tokens }, { chosen }) {
    if (!tokens.length) return html`<p>This answer has no log-probabilities: the setting logprobs asks for them.</p>`;
    const token = tokens[Math.min(chosen, tokens.length - 1)];
    const mean = tokens.reduce((sum, { logprob }) => sum + logprob, 0) / tokens.length;
    const rows = [token, ...token.top_logprobs.filter((other) => other.token !== token.token)];
    rows.sort((one, other) => other.logprob - one.logprob);
    return html`<div class="heat">
      <p
        class="tokens"
        role="listbox"
        aria-label="Tokens, coloured by probability; arrow keys choose one"
        tabindex="0"
        aria-activedescendant="token-chosen"
        onClick=${this.choose}
        onMouseOver=${this.choose}
        onKeyDown=${this.onKey}
      >
        ${tokens.map(
          ({ token: text, logprob }, index) =>
            html`<span
              role="option"
              id=${index === chosen ? "token-chosen" : undefined}
              aria-selected=${index === chosen}
              aria-label=${`${visible(text)} ${percent(logprob)}`}
              data-index=${index}
              data-heat=${heat(logprob)}
              >${visible(text)}</span
            >`,
        )}
      </p>
      <table>
        <caption>
          ${`Token ${chosen + 1} of ${tokens.length}; perplexity ${Math.exp(-mean).toFixed(2)}`}
        </caption>
        <thead>
          <tr>
            <th scope="col">token</th>
            <th scope="col">probability</th>
            <th scope="col">log</th>
          </tr>
        </thead>
        <tbody>
          ${rows.map(
            (row) =>
              html`<tr class=${row.token === token.token ? "taken" : ""}>
                <td><code>${visible(row.token)}</code></td>
                <td>
                  <meter min="0" max="1" value=${Math.exp(row.logprob)} aria-hidden="true"></meter>
                  ${` ${percent(row.logprob)}`}
                </td>
                <td>${row.logprob.toFixed(3)}</td>
              </tr>`,
          )}
        </tbody>
      </table>
    </div>`;
  }
}

// Ten steps of colour: 9 is certain, 0 is a probability below 0.1.
function heat(logprob) {
  return Math.min(Math.floor(Math.exp(logprob) * 10), 9);
}

function percent(logprob) {
  return `${(100 * Math.exp(logprob)).toFixed(1)} %`;
}

function visible(text) {
  return text.replace(/\n/g, "⏎\n").replace(/\t/g, "⇥") || "∅";
}
