// Asking for answers: builds the request, streams the answer into its nodes, and measures.
//
// An answer's node has:
//   lane      "A" or "B": whose settings it has; index: which choice of its request it is
//   exchange  {request, events: [{at, data}]}: what was sent and what came, `at` in ms; shared by the choices of one
//             request
//   state     "waiting", "streaming", "done", "stopped" or "failed" (then `error` says why)
//   times     {first, last}: ms from the request to the first and the latest token
//   count     tokens that have come, as far as known before the end
//   tokens    log-probabilities, a token each; usage, finish: as the server says at the end

import { ApiError, request, streamed } from "./api.js";
import { addNode, choose, newChat, newId, pathTo, touch } from "./chats.js";
import { laneFields } from "./fields.js";
import { app, changed, saveChat, say } from "./store.js";

const running = new Map(); // AbortController of each exchange that streams

export function isRunning(chat) {
  return [...running.keys()].some((exchange) => exchange.chat === chat.id);
}

export function stop(chat) {
  for (const [exchange, controller] of running) if (exchange.chat === chat.id) controller.abort();
}

// Adds a user's message after the last one shown, and asks for its answer.
export async function send(text, images) {
  const chat = app.chat;
  const last = lastShown(chat);
  const node = addNode(chat, last ? last.id : "root", { role: "user", text, images });
  if (!last) chat.title = text.trim().slice(0, 60) || "Image";
  await answer(chat, node);
}

// Adds a changed version of a user's message as another branch, and asks for its answer.
export async function resend(node, text) {
  const chat = app.chat;
  await answer(chat, addNode(chat, node.parent, { role: "user", text, images: node.images }));
}

// Asks again for the answer to the message before a node.
export async function regenerate(node) {
  await answer(app.chat, app.chat.nodes[node.parent]);
}

export function openNewChat() {
  app.chat = newChat();
  app.editing = "";
  changed();
}

function lastShown(chat) {
  let last = null;
  for (let id = chat.active.root; id; id = chat.active[id]) last = chat.nodes[id];
  return last;
}

// The lanes that answer: A, and B as well if two answers are to run side by side.
export function lanes() {
  return app.settings.compare ? ["A", "B"] : ["A"];
}

// What is wrong with the settings that the next answer would use; empty if nothing is.
export function settingsProblem() {
  for (const lane of lanes()) {
    const [problem] = Object.entries(laneFields(app.fields, app.settings[lane.toLowerCase()]).problems);
    if (problem) return `${lanes().length > 1 ? `Settings ${lane}: ` : ""}${problem[0]} ${problem[1]}.`;
  }
  return "";
}

async function answer(chat, user) {
  const group = newId();
  const exchanges = lanes().map((lane) => {
    const settings = app.settings[lane.toLowerCase()];
    const body = requestBody(settings.system, pathTo(chat, user), laneFields(app.fields, settings).fields);
    const exchange = { chat: chat.id, request: body, events: [] };
    const nodes = Array.from({ length: body.n || 1 }, (_, index) =>
      addNode(chat, user.id, {
        group,
        role: "assistant",
        lane,
        index,
        exchange,
        state: "waiting",
        error: "",
        times: {},
        count: 0,
        tokens: [],
        usage: null,
        finish: "",
      }),
    );
    return { exchange, nodes };
  });
  choose(chat, exchanges[0].nodes[0]);
  await saveChat(chat); // it appears in the list at once
  await Promise.all(exchanges.map(({ exchange, nodes }) => run(exchange, nodes)));
  say(exchanges[0].nodes[0].state === "failed" ? "The answer failed." : "The answer is complete.");
  if (app.chats.includes(chat)) await saveChat(chat); // it may have been deleted meanwhile
}

// Returns the JSON of a request for the answer to the last message of a path.
function requestBody(system, path, fields) {
  const messages = path.filter((node) => node.text || node.images.length).map(message);
  if (system.trim()) messages.unshift({ role: "system", content: system });
  return { model: app.model.id, messages, ...fields, stream: true, stream_options: { include_usage: true } };
}

function message({ role, text, images }) {
  if (!images.length) return { role, content: text };
  const parts = images.map((url) => ({ type: "image_url", image_url: { url } }));
  return { role, content: text ? [...parts, { type: "text", text }] : parts };
}

// Streams the answers of one request into their nodes. Never raises: what goes wrong is written there.
async function run(exchange, nodes) {
  const controller = new AbortController();
  running.set(exchange, controller);
  const started = performance.now();
  let state = "done";
  let error = "";
  try {
    const response = await request("v1/chat/completions", {
      method: "POST",
      headers: { "Content-Type": "application/json" },
      body: JSON.stringify(exchange.request),
      signal: controller.signal,
    });
    for await (const data of streamed(response)) {
      const at = Math.round((performance.now() - started) * 10) / 10;
      exchange.events.push({ at, data });
      take(nodes, JSON.parse(data), at);
    }
  } catch (caught) {
    if (caught.name === "AbortError") state = "stopped";
    else {
      state = "failed";
      error = explained(caught);
    }
  }
  for (const node of nodes) {
    node.state = state;
    node.error = error;
    touch(node);
  }
  running.delete(exchange);
  changed();
}

// Takes one event into the nodes of its request.
function take(nodes, event, at) {
  if (event.error) throw new ApiError(0, event.error);
  for (const choice of event.choices) {
    const node = nodes[choice.index];
    // Reasoning and tool calls will come in `delta` as well: their texts go into fields of the node here, and parts.js
    // shows them.
    const text = choice.delta.content || "";
    const tokens = choice.logprobs?.content || [];
    if (text || tokens.length) {
      node.times.first ??= at;
      node.times.last = at;
      node.state = "streaming";
      node.text += text;
      node.tokens.push(...tokens);
      node.count += tokens.length || 1;
    }
    if (choice.finish_reason) node.finish = choice.finish_reason;
    touch(node);
  }
  if (event.usage) {
    for (const node of nodes) {
      node.usage = event.usage;
      if (nodes.length === 1) node.count = event.usage.completion_tokens;
      touch(node);
    }
  }
  changed();
}

function explained(error) {
  if (!(error instanceof ApiError)) throw error;
  if (error.status === 401) app.keyWanted = true;
  const later = error.retryAfter ? ` Try again in ${error.retryAfter} s.` : "";
  return `${error.message}${later}`;
}

// Tokens for each second of an answer, from the first token to the latest; 0 if that cannot be said.
export function speed({ count, times }) {
  const seconds = (times.last - times.first) / 1000;
  return count > 1 && seconds > 0 ? (count - 1) / seconds : 0;
}
