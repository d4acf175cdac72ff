// The settings of answers: a system prompt, every field of a request, structured output. There are two sets, A and B,
// for answers side by side.

import { GUIDES, laneFields } from "./fields.js";
import { html } from "./html.js";
import { app, newLane, saveSettings } from "./store.js";

export function Settings() {
  const { compare, shown } = app.settings;
  const name = compare ? shown : "a";
  const lane = app.settings[name];
  const { problems } = laneFields(app.fields, lane);
  const set = (change) => {
    Object.assign(lane, change);
    saveSettings();
  };
  const showLane = (letter) => {
    app.settings.shown = letter;
    saveSettings();
  };
  const setCompare = (event) => {
    app.settings.compare = event.target.checked;
    app.settings.shown = event.target.checked ? "b" : "a";
    saveSettings();
  };
  const reset = () => {
    app.settings[name] = newLane();
    saveSettings();
  };
  return html`<aside id="settings" class="drawer" aria-label="Settings">
    <h2>Settings</h2>
    <label class="switch">
      <input type="checkbox" checked=${compare} onChange=${setCompare} /> Two answers side by side
    </label>
    ${compare &&
    html`<div class="lanes" role="group" aria-label="Which answer these settings are for">
      ${["a", "b"].map(
        (letter) =>
          html`<button type="button" aria-pressed=${letter === name} onClick=${() => showLane(letter)}>
            Answer ${letter.toUpperCase()}
          </button>`,
      )}
    </div>`}
    <div key=${name}>
      ${app.task === "chat" &&
      html`<label class="field">
          <span>System prompt</span>
          <textarea rows="3" value=${lane.system} onInput=${(event) => set({ system: event.target.value })}></textarea>
        </label>
        <${Guide} lane=${lane} set=${set} problem=${problems.response_format} />`}
      ${app.fields.map(
        ({ group, fields }, index) =>
          html`<details key=${group} open=${index === 0 || app.task !== "chat"}>
            <summary>${group}${used(fields, lane)}</summary>
            ${fields.map((field) => html`<${Field} key=${field.name} field=${field} lane=${lane} set=${set} problem=${problems[field.name]} />`)}
          </details>`,
      )}
      ${!app.fields.length && html`<p>The fields appear when the server answers.</p>`}
      <button type="button" onClick=${reset}>Reset ${compare ? name.toUpperCase() : "all"}</button>
    </div>
  </aside>`;
}

// How many fields of a group are set.
function used(fields, lane) {
  const count = fields.filter(({ name }) => lane.values[name]).length;
  return count ? html` <span class="badge" aria-label=${`${count} set`}>${count}</span>` : null;
}

// Structured output, of the kinds that the engine knows.
function Guide({ lane, set, problem }) {
  const offered = Object.keys(GUIDES).filter((kind) => app.model?.runtime.guides.includes(kind));
  if (!offered.length && !lane.guide.kind) return null;
  const { kind, text } = lane.guide;
  return html`<div class="field">
    <label>
      <span>Structured output</span>
      <select value=${kind} onChange=${(event) => set({ guide: { kind: event.target.value, text: "" } })}>
        <option value="">None</option>
        ${(offered.includes(kind) || !kind ? offered : [kind, ...offered]).map((name) => html`<option value=${name}>${GUIDES[name].title}</option>`)}
      </select>
    </label>
    ${kind &&
    kind !== "json_object" &&
    html`<textarea
      rows="4"
      spellcheck=${false}
      aria-label=${GUIDES[kind].title}
      aria-invalid=${Boolean(problem)}
      placeholder=${GUIDES[kind].example}
      value=${text}
      onInput=${(event) => set({ guide: { kind, text: event.target.value } })}
    ></textarea>`}
    ${problem && html`<p class="error">${problem}</p>`}
  </div>`;
}

function Field({ field, lane, set, problem }) {
  const { name, kind, options, description, initial, slider, example } = field;
  const value = lane.values[name] ?? "";
  const change = (event) => set({ values: { ...lane.values, [name]: event.target.value } });
  const hint = initial !== undefined ? String(initial) : "default";
  const shared = { id: `field-${name}`, value, onInput: change, "aria-invalid": Boolean(problem), "aria-describedby": `about-${name}` };
  let control;
  if (options && kind !== "strings") {
    control = html`<select ...${shared}>
      <option value="">default${initial === undefined ? "" : `: ${initial}`}</option>
      ${options.map((option) => html`<option value=${option}>${option}</option>`)}
    </select>`;
  } else if (kind === "strings" || kind === "json") {
    const placeholder = kind === "strings" ? "a line each" : JSON.stringify(example) || "JSON";
    control = html`<textarea ...${shared} rows="2" spellcheck=${false} placeholder=${placeholder}></textarea>`;
  } else {
    const numeric = kind === "number" || kind === "integer";
    control = html`<input ...${shared} inputmode=${numeric ? "decimal" : "text"} autocomplete="off" placeholder=${kind === "integers" ? "1, 2, 3" : hint} />`;
  }
  return html`<div class="field">
    <div class=${slider || options || kind === "number" || kind === "integer" ? "row" : ""}>
      <label for=${`field-${name}`}>${name}</label>
      ${control}
    </div>
    ${slider &&
    html`<input
      type="range"
      aria-label=${`${name}, slider`}
      min=${slider[0]}
      max=${slider[1]}
      step=${slider[2]}
      value=${value === "" ? (initial ?? slider[0]) : value}
      onInput=${change}
    />`}
    <p class="about" id=${`about-${name}`}>${description}</p>
    ${problem && html`<p class="error" role="alert">${`${name} ${problem}`}</p>`}
  </div>`;
}
