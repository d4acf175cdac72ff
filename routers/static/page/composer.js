// Where messages are written: text, images and videos by button, drop or paste, send and stop.

import { html, isVideo, Picture, Widget } from "./html.js";
import { isRunning, send, settingsProblem, stop } from "./run.js";
import { app, changed, say } from "./store.js";

const FILES = ["image/png", "image/jpeg", "image/webp", "image/gif", "video/mp4", "video/webm"];

// Puts images and videos of a drop or paste into the draft. Returns whether there were any.
export function addFiles(files) {
  const images = [...files].filter((file) => FILES.includes(file.type));
  for (const file of images) {
    const reader = new FileReader();
    reader.addEventListener("load", () => {
      app.draft.images.push(reader.result);
      say(`${isVideo(reader.result) ? "Video" : "Image"} attached.`);
    });
    reader.readAsDataURL(file);
  }
  return images.length > 0;
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
    const { text, images } = app.draft;
    if (!app.model || isRunning(app.chat) || settingsProblem() || !(text.trim() || images.length)) return;
    app.draft = { text: "", images: [] };
    send(text, images);
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

  render() {
    const { text, images } = app.draft;
    const busy = isRunning(app.chat);
    const problem = settingsProblem();
    return html`<form class="composer" ref=${this.ref} onSubmit=${this.submit}>
      ${problem && html`<p class="error" role="alert">${problem}</p>`}
      ${images.length > 0 &&
      html`<div class="attached">
        ${images.map(
          (url, index) =>
            html`<figure key=${url}>
              <${Picture} url=${url} alt=${`Attached ${isVideo(url) ? "video" : "image"} ${index + 1}`} />
              <button
                type="button"
                aria-label=${`Remove ${isVideo(url) ? "video" : "image"} ${index + 1}`}
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
        <label class="attach" title="Attach images and videos (or drop or paste them)">
          <input type="file" accept=${FILES.join(",")} multiple onChange=${this.pick} aria-label="Attach images" />
          <svg viewBox="0 0 24 24" aria-hidden="true"><path d="M4 5h16v14H4zM4 16l5-5 4 4 3-3 4 4M15.5 9.5h.01" /></svg>
        </label>
        <textarea
          rows="1"
          aria-label="Message"
          placeholder="Ask something"
          value=${text}
          onInput=${this.type}
          onKeyDown=${this.onKey}
          onPaste=${this.paste}
        ></textarea>
        ${busy
          ? html`<button type="button" class="primary stop" onClick=${() => stop(app.chat)}>Stop</button>`
          : html`<button class="primary" disabled=${!app.model || Boolean(problem) || !(text.trim() || images.length)}>Send</button>`}
      </div>
    </form>`;
  }
}
