// Asking for answers: builds the request, streams the answer into its nodes, and measures. tasks.js asks for what is no
// chat.
//
// An answer's node has:
//   lane      "A" or "B": whose settings it has; index: which choice of its request it is
//   exchange  {task, request, events: [{at, data}]}: what was sent and what came, `at` in ms; shared by the choices of one
//             request
//   state     "waiting", "streaming", "done", "stopped" or "failed" (then `error` says why)
//   times     {first, last}: ms from the request to the first and the latest token
//   count     tokens that have come, as far as known before the end
//   reasoning what the model thought before its text
//   calls     tools that it calls, as a message has them in `tool_calls`
//   files     pictures and videos that came, as Blobs; facts: what the server says of them; progress: percent; stage
//   tokens    log-probabilities, a token each; usage, finish: as the server says at the end

import { ApiError, request, streamed } from "./api.js";
import { addNode, choose, newChat, newId, pathTo, touch } from "./chats.js";
import { fieldGroups, laneFields } from "./fields.js";
import { kindOf } from "./html.js";
import { app, changed, readSettings, saveChat, say } from "./store.js";
import { TASKS, tasksOf } from "./tasks.js";

const running = new Map(); // AbortController of each exchange that streams

export function isRunning(chat) {
  return [...running.keys()].some((exchange) => exchange.chat === chat.id);
}

export function stop(chat) {
  for (const [exchange, controller] of running) if (exchange.chat === chat.id) controller.abort();
}

// Has the model asked for something else from now on.
export function chooseTask(name) {
  app.task = name;
  app.fields = fieldGroups(app.document, TASKS[name]);
  app.settings = readSettings();
  changed();
}

// Adds a user's message after the last one shown, and asks for its answer.
export async function send(text, images) {
  const chat = app.chat;
  const last = lastShown(chat);
  const node = addNode(chat, last ? last.id : "root", { role: "user", text, images });
  if (!last) chat.title = text.trim().slice(0, 60) || { image: "Image", video: "Video", audio: "Recording" }[kindOf(images[0])];
  await answer(chat, node);
}

// Adds a changed version of a user's message as another branch, and asks for its answer.
export async function resend(node, text) {
  const chat = app.chat;
  await answer(chat, addNode(chat, node.parent, { role: "user", text, images: node.images }));
}

// Adds what the calls of an answer returned, a text for each, and asks for the next answer.
export async function sendResults(chat, node, texts) {
  const results = wholeCalls(node).map(({ id, function: { name } }, index) => ({ id, name, text: texts[index] }));
  await answer(chat, addNode(chat, node.id, { role: "tool", results }));
}

// The calls of an answer that are complete: one that was cut off has no arguments that the server would take back.
export function wholeCalls({ calls = [] }) {
  return calls.filter((call) => {
    try {
      const value = JSON.parse(call.function.arguments);
      return value !== null && typeof value === "object" && !Array.isArray(value);
    } catch {
      return false;
    }
  });
}

// Asks again for the answer to the message before a node.
export async function regenerate(node) {
  const { task } = node.exchange;
  if (task && task !== app.task && tasksOf(app.model).includes(task)) chooseTask(task);
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

async function answer(chat, asked) {
  const group = newId();
  const exchanges = lanes().map((lane) => {
    const settings = app.settings[lane.toLowerCase()];
    const { task } = app;
    const { fields } = laneFields(app.fields, settings);
    const body =
      task === "chat"
        ? requestBody(settings.system, pathTo(chat, asked), fields)
        : { model: app.model.id, ...TASKS[task].body(asked, fields) };
    const exchange = { chat: chat.id, task, request: body, events: [] };
    const nodes = Array.from({ length: (task === "chat" && body.n) || 1 }, (_, index) =>
      addNode(chat, asked.id, {
        group,
        role: "assistant",
        lane,
        index,
        exchange,
        state: "waiting",
        error: "",
        times: {},
        count: 0,
        reasoning: "",
        calls: [],
        files: [],
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
  const messages = path.flatMap(messagesOf);
  if (system.trim()) messages.unshift({ role: "system", content: system });
  return { model: app.model.id, messages, ...fields, stream: true, stream_options: { include_usage: true } };
}

// The messages that a node is in a request: none if it is empty, and one for each result of a tool.
function messagesOf(node) {
  const { role, text, images, reasoning, results } = node;
  if (role === "tool") return results.map((one) => ({ role, tool_call_id: one.id, name: one.name, content: one.text }));
  if (images.length) {
    const parts = images.map((url) => ({ type: `${kindOf(url)}_url`, [`${kindOf(url)}_url`]: { url } }));
    return [{ role, content: text ? [...parts, { type: "text", text }] : parts }];
  }
  const calls = wholeCalls(node);
  if (!text && !reasoning && !calls.length) return [];
  const message = { role, content: text };
  if (reasoning) message.reasoning_content = reasoning;
  if (calls.length) message.tool_calls = calls;
  return [message];
}

// Streams the answers of one request into their nodes. Never raises: what goes wrong is written there.
async function run(exchange, nodes) {
  const controller = new AbortController();
  running.set(exchange, controller);
  const started = performance.now();
  let state = "done";
  let error = "";
  try {
    const now = () => Math.round((performance.now() - started) * 10) / 10;
    const { signal } = controller;
    const send = (path, options = {}) => request(path, { ...options, signal });
    if (exchange.task === "chat") await chat(exchange, nodes, send, now);
    else {
      const [node] = nodes;
      const note = (data) => {
        exchange.events.push({ at: now(), data });
        node.state = "streaming";
        touch(node);
        changed();
      };
      await TASKS[exchange.task].ask(exchange.request, node, { send, note, signal });
      node.times.last = now();
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

async function chat(exchange, nodes, send, now) {
  const response = await send("v1/chat/completions", {
    method: "POST",
    headers: { "Content-Type": "application/json" },
    body: JSON.stringify(exchange.request),
  });
  for await (const data of streamed(response)) {
    const at = now();
    exchange.events.push({ at, data });
    take(nodes, JSON.parse(data), at);
  }
}

// Takes one event into the nodes of its request.
function take(nodes, event, at) {
  if (event.error) throw new ApiError(0, event.error);
  for (const choice of event.choices) {
    const node = nodes[choice.index];
    const { delta } = choice;
    const text = delta.content || "";
    const reasoning = delta.reasoning_content || "";
    const old = delta.function_call; // the answer to `functions`
    const calls = delta.tool_calls || (old ? [{ index: 0, function: old }] : []);
    const tokens = choice.logprobs?.content || [];
    if (text || reasoning || calls.length || tokens.length) {
      node.times.first ??= at;
      node.times.last = at;
      node.state = "streaming";
      node.text += text;
      node.reasoning += reasoning;
      for (const call of calls) takeCall(node.calls, call);
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

// Takes a piece of a call: the first has its id and name, all have some of its arguments.
function takeCall(calls, { index, id = newId(), function: { name, arguments: text = "" } }) {
  calls[index] ??= { id, type: "function", function: { name, arguments: "" } };
  calls[index].function.arguments += text;
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
