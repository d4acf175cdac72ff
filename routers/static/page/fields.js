// The fields of a request, read from the server's own description at /openapi.json: a field that the server learns
// appears here by itself, with its text, bounds and default. Fields that the server refuses or ignores do not.

const GROUPS = [
  ["Picture", "size seconds fps num_frames num_inference_steps guidance_scale negative_prompt strength"],
  ["Sampling", "temperature top_p top_k min_p max_tokens seed n"],
  ["Penalties", "repetition_penalty presence_penalty frequency_penalty logit_bias bad_words allowed_token_ids"],
  ["Stopping", "stop stop_token_ids include_stop_str_in_output min_tokens ignore_eos"],
  ["Log-probabilities", "logprobs top_logprobs prompt_logprobs"],
];
const OTHERS = "More";

// Ranges of sliders, for fields whose bounds are far from what people choose.
const SLIDERS = {
  temperature: [0, 2, 0.05],
  top_p: [0.01, 1, 0.01],
  min_p: [0, 1, 0.01],
  top_k: [0, 200, 1],
  repetition_penalty: [0.8, 1.5, 0.01],
  presence_penalty: [-2, 2, 0.05],
  frequency_penalty: [-2, 2, 0.05],
};

// Returns [{group, fields: [{name, kind, options, description, minimum, maximum, initial, slider, example}]}] of a task
// (tasks.js).
export function fieldGroups(document, { schema: type, ours }) {
  const { properties } = document.components.schemas[type];
  const set = new Set(ours.split(" "));
  const found = new Map();
  for (const [name, schema] of Object.entries(properties)) {
    const kind = kindOf(schema);
    if (!kind || set.has(name) || schema["x-unsupported"]) continue;
    found.set(name, {
      name,
      kind,
      options: optionsOf(schema, kind),
      description: schema.description || "",
      minimum: schema.minimum,
      maximum: schema.maximum,
      initial: schema.default,
      slider: sliderOf(name, schema),
      example: schema.examples?.[0],
    });
  }
  const groups = GROUPS.map(([group, names]) => {
    const fields = names.split(" ").flatMap((name) => found.get(name) || []);
    for (const field of fields) found.delete(field.name);
    return { group, fields };
  });
  return [...groups, { group: OTHERS, fields: [...found.values()] }].filter(({ fields }) => fields.length);
}

// Returns how a field is typed: number, integer, boolean, string, strings, integers or json; "" if it has no type.
function kindOf(schema) {
  const choices = schema.anyOf || [schema];
  const types = choices.flatMap((choice) => choice.type || (choice.$ref ? "object" : []));
  for (const type of ["number", "integer", "boolean"]) if (types.includes(type)) return type;
  const list = choices.find((choice) => [choice.type].flat().includes("array"));
  if (list) return { string: "strings", integer: "integers" }[list.items?.type] || "json";
  if (types.includes("object")) return "json";
  return types.includes("string") ? "string" : "";
}

function sliderOf(name, { maximum = Infinity }) {
  if (!SLIDERS[name]) return undefined;
  const [low, high, step] = SLIDERS[name];
  return [low, Math.min(high, maximum), step];
}

// Returns what a field may be, if that is a list of words.
function optionsOf(schema, kind) {
  if (kind === "boolean") return ["true", "false"];
  return [schema, ...(schema.anyOf || [])].find((choice) => choice.enum)?.enum.filter(Boolean);
}

// Returns the value of a field as it was typed; undefined if it was left empty. Raises Error with what is wrong.
export function parseField({ kind, minimum, maximum }, text) {
  if (text === undefined || text === "") return undefined;
  if (kind === "boolean") return text === "true";
  if (kind === "string") return text;
  if (kind === "strings" && !text.trimStart().startsWith("[")) return text.split("\n").filter(Boolean);
  if (kind === "integers" && !text.trimStart().startsWith("[")) return text.split(/[\s,]+/).filter(Boolean).map(integer);
  if (kind === "number" || kind === "integer") {
    const value = kind === "integer" ? integer(text) : Number(text);
    if (Number.isNaN(value)) throw new Error("must be a number");
    if (value < minimum) throw new Error(`must be at least ${minimum}`);
    if (value > maximum) throw new Error(`must be at most ${maximum}`);
    return value;
  }
  return json(text);
}

function integer(text) {
  if (!/^\s*-?\d+\s*$/.test(text)) throw new Error("must be a whole number");
  return Number(text);
}

function json(text) {
  try {
    return JSON.parse(text);
  } catch (error) {
    throw new Error(`is not JSON: ${error.message}`);
  }
}

// Structured output: kinds by what the engine calls them, and how a request asks for each.

export const GUIDES = {
  json_object: { title: "Any JSON object" },
  json_schema: { title: "JSON schema", example: '{"type": "object", "properties": {"city": {"type": "string"}}}' },
  regex: { title: "Regular expression", example: "[0-9]{4}" },
  choice: { title: "One of (a line each)", example: "yes\nno" },
  grammar: { title: "EBNF grammar", example: 'root ::= "yes" | "no"' },
};

// Returns `response_format` for a guide; undefined for none. Raises Error.
export function responseFormat({ kind, text }) {
  if (!kind) return undefined;
  if (kind === "json_object") return { type: "json_object" };
  if (!text.trim()) throw new Error("is empty");
  if (kind === "json_schema") return { type: "json_schema", json_schema: { name: "answer", schema: json(text) } };
  if (kind === "choice") return { type: "choice", choices: text.split("\n").filter(Boolean) };
  return { type: kind, [kind]: text };
}

// Returns the fields of a request that a lane's settings ask for, and what is wrong with others: {fields, problems}.
export function laneFields(groups, lane) {
  const fields = {};
  const problems = {};
  for (const field of groups.flatMap((group) => group.fields)) {
    try {
      const value = parseField(field, lane.values[field.name]);
      if (value !== undefined) fields[field.name] = value;
    } catch (error) {
      problems[field.name] = error.message;
    }
  }
  if (!fields.logprobs) delete fields.top_logprobs; // which the server takes only together
  try {
    const format = responseFormat(lane.guide);
    if (format) fields.response_format = format;
  } catch (error) {
    problems.response_format = error.message;
  }
  return { fields, problems };
}
