// Templates: html`<p class=${name}>…</p>` makes an element of preact.

import htm from "../vendor/htm.mjs";
import { Component, h } from "../vendor/preact.mjs";

export const html = htm.bind(h);
export { Component, render } from "../vendor/preact.mjs";

// Copies a text. Browsers keep the clipboard from pages without TLS on other machines; selecting and copying works there.
export async function copyText(text) {
  if (navigator.clipboard) return navigator.clipboard.writeText(text);
  const area = document.createElement("textarea");
  area.value = text;
  document.body.append(area);
  area.select();
  document.execCommand("copy");
  area.remove();
}

// What a data URL holds: image, video or audio.
export const kindOf = (url) => url.slice("data:".length, url.indexOf("/"));

// Returns the file in a data URL.
export function blobOf(url) {
  const [head, data] = url.split(",");
  return new Blob([Uint8Array.from(atob(data), (letter) => letter.charCodeAt(0))], { type: head.slice("data:".length, head.indexOf(";")) });
}

// An image, a video or a recording that was attached.
export function Attachment({ url, alt }) {
  const kind = kindOf(url);
  if (kind === "video") return html`<video src=${url} aria-label=${alt} controls muted></video>`;
  if (kind === "audio") return html`<audio src=${url} aria-label=${alt} controls></audio>`;
  return html`<img src=${url} alt=${alt} />`;
}

// A component that reaches its element: the outermost tag of its template says ref=${this.ref}.
export class Widget extends Component {
  ref = (element) => {
    this.element = element;
  };
}
