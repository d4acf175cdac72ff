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

// Whether a data URL is a video's.
export const isVideo = (url) => url.startsWith("data:video/");

// An image or a video that was attached.
export function Picture({ url, alt }) {
  return isVideo(url) ? html`<video src=${url} aria-label=${alt} controls muted></video>` : html`<img src=${url} alt=${alt} />`;
}

// A component that reaches its element: the outermost tag of its template says ref=${this.ref}.
export class Widget extends Component {
  ref = (element) => {
    this.element = element;
  };
}
