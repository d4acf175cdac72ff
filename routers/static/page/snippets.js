// A request as commands to repeat it. The key is never in them: they read it from the environment.

import { BASE } from "./api.js";

// The files of a form are not shown.
export function asJson(body) {
  return JSON.stringify(body, (name, value) => (value instanceof Blob ? `a file of ${value.size} bytes` : value), 2);
}

export function asCurl(path, body) {
  const key = '-H "Authorization: Bearer $API_KEY"';
  if (Object.values(body).some((value) => value instanceof Blob)) {
    const parts = Object.entries(body).map(([name, value]) => (value instanceof Blob ? `-F ${name}=@FILE` : `--form-string ${quoted(`${name}=${value}`)}`));
    return [`curl -N ${BASE}${path}`, key, ...parts].join(" \\\n  ");
  }
  // JSON has no line that is EOF alone, so that nothing in it can end the here-document.
  return `curl -N ${BASE}${path} \\
  ${key} \\
  -H "Content-Type: application/json" \\
  -d @- <<'EOF'
${JSON.stringify(body, null, 2)}
EOF
`;
}

// Quotes a text for a shell.
function quoted(text) {
  return `'${text.replaceAll("'", "'\\''")}'`;
}

// Fields that OpenAI's SDK has arguments for; others go into extra_body.
const SDK = new Set(
  ("model messages stream stream_options max_tokens temperature top_p n stop seed presence_penalty frequency_penalty " +
    "logit_bias logprobs top_logprobs response_format reasoning_effort").split(" "),
);

export function asPython(body) {
  const named = Object.entries(body).filter(([name]) => SDK.has(name));
  const extra = Object.fromEntries(Object.entries(body).filter(([name]) => !SDK.has(name)));
  if (Object.keys(extra).length) named.push(["extra_body", extra]);
  const lines = named.map(([name, value]) => `    ${name}=${literal(value, 1)},`);
  return `import os

from openai import OpenAI

client = OpenAI(base_url="${BASE}v1", api_key=os.environ.get("API_KEY", "unused"))
stream = client.chat.completions.create(
${lines.join("\n")}
)
for chunk in stream:
    for choice in chunk.choices:
        print(choice.delta.content or "", end="", flush=True)
print()
`;
}

// Spells a JSON value as Python does.
function literal(value, depth) {
  const indent = "    ".repeat(depth + 1);
  const end = "    ".repeat(depth);
  if (value === null) return "None";
  if (typeof value === "boolean") return value ? "True" : "False";
  if (typeof value !== "object") return JSON.stringify(value);
  const list = Array.isArray(value);
  const items = list
    ? value.map((item) => indent + literal(item, depth + 1))
    : Object.entries(value).map(([name, item]) => `${indent}${JSON.stringify(name)}: ${literal(item, depth + 1)}`);
  const [open, close] = list ? "[]" : "{}";
  if (!items.length) return open + close;
  const short = open + items.map((item) => item.trimStart()).join(", ") + close;
  return short.length < 80 && !short.includes("\n") ? short : `${open}\n${items.join(",\n")},\n${end}${close}`;
}
