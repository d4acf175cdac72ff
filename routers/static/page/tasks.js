// What a model can be asked for: answers in a chat, transcripts of speech, pictures, videos. A task has
//
//   name      in menus; schema: of its requests in /openapi.json; ours: fields that the page sets itself
//   path      returns that of a request
//   hint      in the empty composer; verb: on its button; welcome: above an empty chat
//   needs     "text", "audio" or "any": what a request cannot do without
//   body      returns the request for the user's node; a value that is a Blob makes it a form
//   ask       sends it, and fills the node of its answer. Raises ApiError, and AbortError if it is stopped
//
// A chat is asked in run.js.

import { ApiError, request, streamed } from "./api.js";
import { blobOf } from "./html.js";

const POLL_MS = 500;

const chat = {
  name: "Chat",
  schema: "ChatCompletionRequest",
  ours: "model messages stream stream_options response_format structured_outputs max_completion_tokens request_id",
  path: () => "v1/chat/completions",
  hint: "Ask something",
  verb: "Send",
  needs: "any",
  welcome: ({ id, max_model_len: length }) => [`Talk to ${id}`, `It takes ${length.toLocaleString("en")} tokens of text.`],
};

const transcript = {
  name: "Transcribe",
  schema: "TranscriptionRequest",
  ours: "model file prompt stream include",
  path: () => "v1/audio/transcriptions",
  hint: "Names and words that are said (not needed)",
  verb: "Transcribe",
  needs: "audio",
  welcome: ({ id }) => [`${id} writes down what is said`, "Attach a recording, or make one."],

  body({ text, images }, fields) {
    const streams = ["json", "text", undefined].includes(fields.response_format);
    return { ...fields, ...(text && { prompt: text }), ...(streams && this.streams && { stream: true }), file: blobOf(images.at(-1)) };
  },
  streams: true,

  async ask(body, node, { send, note }) {
    const response = await send(this.path(), { method: "POST", body: form(body) });
    if (!body.stream) {
      node.text = await response.text();
      note(node.text);
      if ((body.response_format || "json") === "json") node.text = JSON.parse(node.text).text;
      return;
    }
    for await (const data of streamed(response)) {
      const event = JSON.parse(data);
      if (event.error) throw new ApiError(0, event.error);
      node.text = event.delta === undefined ? event.text : node.text + event.delta;
      note(data);
    }
  },
};

const translation = {
  ...transcript,
  name: "Translate",
  schema: "TranslationRequest",
  path: () => "v1/audio/translations",
  verb: "Translate",
  streams: false,
};

const picture = {
  name: "Picture",
  schema: "ImageEditRequest",
  ours: "model prompt response_format user stream partial_images background",
  path: ({ image }) => (image ? "v1/images/edits" : "v1/images/generations"),
  hint: "What is to be seen?",
  verb: "Draw",
  needs: "text",
  welcome: ({ id, runtime }) => [
    `${id} draws pictures`,
    runtime.takes.includes("image") ? "Attach one to have it changed." : "Size, steps and seed are in the settings.",
  ],

  body({ text, images }, { strength, ...fields }) {
    if (!images.length) return { ...fields, prompt: text };
    return { ...fields, ...(strength && { strength }), prompt: text, image: blobOf(images.at(-1)) };
  },

  async ask(body, node, { send, note }) {
    const options = body.image ? { body: form(body) } : json(body);
    const answer = await (await send(this.path(body), { method: "POST", ...options })).json();
    node.files = answer.data.map((one) => blobOf(`data:image/${answer.output_format};base64,${one.b64_json}`));
    note(JSON.stringify({ ...answer, data: answer.data.map(({ seed }) => ({ seed })) }));
    node.facts = { size: answer.size, [answer.data.length > 1 ? "seeds" : "seed"]: answer.data.map(({ seed }) => seed).join(", ") };
  },
};

const video = {
  name: "Video",
  schema: "VideoRequest",
  ours: "model prompt user input_reference",
  path: () => "v1/videos",
  hint: "What is to be seen?",
  verb: "Make video",
  needs: "text",
  welcome: ({ id }) => [`${id} makes videos`, "Size, length, steps and seed are in the settings."],

  body: ({ text, images }, fields) => ({ ...fields, prompt: text, ...(images.length && { input_reference: { image_url: images.at(-1) } }) }),

  // The job is cancelled if it is stopped; it goes on if the page is closed.
  async ask(body, node, { send, note, signal }) {
    let job = await (await send(this.path(), { method: "POST", ...json(body) })).json();
    const place = `${this.path()}/${job.id}`;
    const cancel = () => request(`${place}/cancel`, { method: "POST" }).catch(() => {});
    signal.addEventListener("abort", cancel);
    let told = "";
    while (job.status === "queued" || job.status === "in_progress") {
      const now = `${job.stage || job.status} ${job.progress} %`;
      if (now !== told) note(JSON.stringify(job));
      told = now;
      node.progress = job.progress;
      node.stage = { queued: "waiting", generating: "computing frames", postprocessing: "writing the file" }[job.stage || job.status];
      await new Promise((resolve) => setTimeout(resolve, POLL_MS));
      job = await (await send(place)).json();
    }
    note(JSON.stringify(job));
    if (job.status !== "completed") throw new ApiError(0, job.error || { message: "The video was cancelled elsewhere." });
    node.files = [await (await send(`${place}/content`)).blob()];
    node.facts = { size: job.size, frames: job.num_frames, seconds: job.seconds, seed: job.seed };
  },
};

export const TASKS = { chat, transcript, translation, picture, video };

// Returns the names of what a model can be asked for.
export function tasksOf({ runtime: { makes, takes } }) {
  if (!makes.includes("text")) return makes.map((kind) => (kind === "image" ? "picture" : kind));
  if (takes.length && !takes.includes("text")) return ["transcript", "translation"];
  return ["chat"];
}

function json(body) {
  return { body: JSON.stringify(body), headers: { "Content-Type": "application/json" } };
}

function form(body) {
  const data = new FormData();
  for (const [name, value] of Object.entries(body)) {
    for (const one of [value].flat()) data.append(Array.isArray(value) ? `${name}[]` : name, one);
  }
  return data;
}
