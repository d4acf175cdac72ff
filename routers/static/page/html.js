// Templates: html`<p class=${name}>…</p>` makes an element of preact.

import htm from "../vendor/htm.mjs";
import { Component, h } from "../vendor/preact.mjs";

export const html = htm.bind(h);
export { Component, render } from "../vendor/preact.mjs";

// A component that reaches its element: the outermost tag of its template says ref=${this.ref}.
export class Widget extends Component {
  ref = (element) => {
    this.element = element;
  };
}
