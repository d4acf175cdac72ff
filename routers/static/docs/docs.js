// Shows /openapi.json with Swagger UI. With API keys set, it asks for one, and keeps it in this tab as the page at `/`
// does. Swagger UI sends it with what "Try it out" asks.

import { getKey, setKey } from "../page/key.js";

const form = document.getElementById("key");
const field = document.getElementById("value");
const problem = document.getElementById("problem");
const docs = document.getElementById("docs");

function headers() {
  return getKey() ? { Authorization: `Bearer ${getKey()}` } : {};
}

async function show() {
  const answer = await fetch("openapi.json", { headers: headers() });
  form.hidden = answer.status !== 401;
  if (answer.status === 401) {
    docs.textContent = "";
    problem.textContent = getKey() ? "The server does not know this key." : "";
    field.focus();
    return;
  }
  const spec = await answer.json();
  if (!answer.ok) {
    docs.textContent = spec.error.message;
    return;
  }
  window.SwaggerUIBundle({
    spec,
    domNode: docs,
    deepLinking: true,
    validatorUrl: null,
    requestInterceptor: (request) => {
      request.headers = { ...headers(), ...request.headers };
      return request;
    },
  });
}

form.addEventListener("submit", (event) => {
  event.preventDefault();
  setKey(field.value.trim());
  show();
});

show();
