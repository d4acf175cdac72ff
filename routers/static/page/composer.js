// Where messages are written: text, images, videos and recordings by button, drop or paste, send and stop.

import { Attachment, html, kindOf, Widget } from "./html.js";
import { record } from "./record.js";
import { chooseTask, isRunning, send, settingsProblem, stop } from "./run.js";
import { app, changed, say } from "./store.js";
import { TASKS, tasksOf } from "./tasks.js";

const FORMATS = {
  image: ["image/png", "image/jpeg", "image/webp", "image/gif"],
  video: ["video/mp4", "video/webm", "video/x-matroska", "video/quicktime", "video/x-msvideo"],
  audio: ["audio/wav", "audio/x-wav", "audio/flac", "audio/x-flac", "audio/mpeg", "audio/ogg", "audio/opus"],
};
const NAMES = { image: "Image", video: "Video", audio: "Recording" };
const nameOf = (url) => NAMES[kindOf(url)];

// What the model takes besides text.
function takenKinds() {
  return Object.keys(FORMATS).filter((kind) => app.model?.runtime.takes.includes(kind));
}

// Puts files of a drop or paste into the draft, and says which the model does not take. Returns whether there were any.
export function addFiles(files) {
  const taken = takenKinds().flatMap((kind) => FORMATS[kind]);
  app.refused = "";
  for (const file of files) {
    if (!taken.includes(file.type)) {
      app.refused = `${app.model?.id} does not take ${file.name} (${file.type || "of a type that the browser does not know"}).`;
      say(app.refused);
      continue;
    }
    const reader = new FileReader();
    reader.addEventListener("load", () => {
      app.draft.images.push(reader.result);
      say(`${nameOf(reader.result)} attached.`);
    });
    reader.readAsDataURL(file);
  }
  return files.length > 0;
}

export class Composer extends Widget {
  get area() {
    return this.element.querySelector("textarea");
  }

  componentDidMount() {
    this.area.focus();
  }

  // The field grows with its text.
  componentDidUpdate() {
    this.area.style.height = "auto";
    this.area.style.height = `${this.area.scrollHeight + 2}px`;
  }

  submit = (event) => {
    event?.preventDefault();
    if (this.complete && !isRunning(app.chat)) {
      const { text, images } = app.draft;
      app.draft = { text: "", images: [] };
      app.refused = "";
      send(text, images);
    }
  };

  // Whether there is all that a request needs.
  get complete() {
    const { text, images } = app.draft;
    const given = { text: text.trim(), any: text.trim() || images.length, audio: images.some((url) => kindOf(url) === "audio") };
    return app.model && !settingsProblem() && given[TASKS[app.task].needs];
  }

  record = async () => {
    app.refused = "";
    try {
      const { end } = this.state;
      this.setState({ end: end ? null : await record() });
      if (end) addFiles([await end()]);
    } catch (error) {
      app.refused = error.message;
    }
    changed();
  };

  type = (event) => {
    app.draft.text = event.target.value;
    changed();
  };

  onKey = (event) => {
    if (event.key === "Enter" && !event.shiftKey && !event.isComposing) this.submit(event);
  };

  paste = (event) => {
    if (addFiles(event.clipboardData.files)) event.preventDefault();
  };

  pick = (event) => {
    addFiles(event.target.files);
    event.target.value = "";
  };

  render(_, { end }) {
    const { text, images } = app.draft;
    const busy = isRunning(app.chat);
    const problem = settingsProblem() || app.refused;
    const task = TASKS[app.task];
    const kinds = takenKinds();
    const tasks = app.model ? tasksOf(app.model) : [];
    const names = kinds.map((kind) => `${NAMES[kind].toLowerCase()}s`).join(", ");
    return html`<form class="composer" ref=${this.ref} onSubmit=${this.submit}>
      ${problem && html`<p class="error" role="alert">${problem}</p>`}
      ${images.length > 0 &&
      html`<div class="attached">
        ${images.map(
          (url, index) =>
            html`<figure key=${url}>
              <${Attachment} url=${url} alt=${`Attached ${nameOf(url).toLowerCase()} ${index + 1}`} />
              <button
                type="button"
                aria-label=${`Remove ${nameOf(url).toLowerCase()} ${index + 1}`}
                onClick=${() => {
                  app.draft.images = images.filter((other) => other !== url);
                  changed();
                }}
              >
                ×
              </button>
            </figure>`,
        )}
      </div>`}
      <div class="box">
        ${kinds.length > 0 &&
        html`<label class="attach" title=${`Attach ${names} (or drop or paste them)`}>
          <input type="file" accept=${kinds.flatMap((kind) => FORMATS[kind]).join(",")} multiple onChange=${this.pick} aria-label="Attach files" />
          <svg viewBox="0 0 24 24" aria-hidden="true"><path d="M18 9l-7.5 7.5a2 2 0 0 1-3-3L15 6a3.5 3.5 0 0 1 5 5l-8 8a5 5 0 0 1-7-7l7-7" /></svg>
        </label>`}
        ${kinds.includes("audio") &&
        html`<button type="button" class="attach" title=${end ? "End the recording" : "Record"} aria-label="Record" aria-pressed=${Boolean(end)} onClick=${this.record}>
          <svg viewBox="0 0 24 24" aria-hidden="true"><path d="M9 5a3 3 0 0 1 6 0v6a3 3 0 0 1-6 0zM5 11a7 7 0 0 0 14 0M12 18v3" /></svg>
        </button>`}
        ${tasks.length > 1 &&
        html`<select class="task" aria-label="Task" value=${app.task} onChange=${(event) => chooseTask(event.target.value)}>
          ${tasks.map((name) => html`<option value=${name}>${TASKS[name].name}</option>`)}
        </select>`}
        <textarea
          rows="1"
          aria-label="Message"
          placeholder=${task.hint}
          value=${text}
          onInput=${this.type}
          onKeyDown=${this.onKey}
          onPaste=${this.paste}
        ></textarea>
        ${busy
          ? html`<button type="button" class="primary stop" onClick=${() => stop(app.chat)}>Stop</button>`
          : html`<button class="primary" disabled=${!this.complete}>${task.verb}</button>`}
      </div>
    </form>`;
  }
}
