// The state of the page, in one object. Whoever changes it calls `changed()`, and the page is drawn anew.
//
// Chats are kept in this browser (IndexedDB, since images are large), settings and theme in localStorage.

const SETTINGS = "trellis-settings";
const THEME = "trellis-theme";

export const app = {
  model: null, // what /v1/models says of the model
  health: "", // why the server is not ready; empty if it is
  keyWanted: false, // whether the server has refused our key, or the lack of one
  document: null, // what /openapi.json says
  task: "chat", // what the model is asked for, see tasks.js
  fields: [], // what the settings offer, see fields.js
  chats: [], // newest first
  chat: null, // the one that is shown, see chats.js
  draft: { text: "", images: [] },
  refused: "", // why something could not be attached
  editing: "", // id of the message that is being edited
  opened: "", // which drawer is open on a narrow screen: "chats", "settings" or none
  settingsShown: true, // on a wide screen
  chartsShown: false,
  notice: "", // said aloud to screen readers
  live: { now: null, history: [] }, // see live.js
  theme: localStorage.getItem(THEME) || "auto",
  settings: null, // of the task: two lanes, and which of them are used
};
app.settings = readSettings();

// One set of settings: a system prompt, fields as they were typed, and what the output must match.
export function newLane() {
  const chat = { temperature: "0.7", top_p: "0.95", logprobs: "true", top_logprobs: "3" };
  return { system: "", values: app.task === "chat" ? chat : {}, guide: { kind: "", text: "" } };
}

// Each task has settings of its own.
function settingsKey() {
  return app.task === "chat" ? SETTINGS : `${SETTINGS}-${app.task}`;
}

export function readSettings() {
  const fresh = { compare: false, shown: "a", a: newLane(), b: newLane() };
  try {
    return { ...fresh, ...JSON.parse(localStorage.getItem(settingsKey())) };
  } catch {
    return fresh; // somebody else's text
  }
}

export function saveSettings() {
  localStorage.setItem(settingsKey(), JSON.stringify(app.settings));
  changed();
}

export function setTheme(theme) {
  app.theme = theme;
  localStorage.setItem(THEME, theme);
  applyTheme();
  changed();
}

export function applyTheme() {
  document.documentElement.dataset.theme = app.theme;
}

// Drawing: at most once for each frame of the screen, however many tokens came.

let draw = () => {};
let waiting = false;

export function onChange(listener) {
  draw = listener;
}

export function changed() {
  if (waiting) return;
  waiting = true;
  requestAnimationFrame(() => {
    waiting = false;
    draw();
  });
}

export function say(text) {
  app.notice = text;
  changed();
}

// Chats. Without IndexedDB, as in some private windows, they last as long as the page.

let database = null;

function asked(request) {
  return new Promise((resolve, reject) => {
    request.onsuccess = () => resolve(request.result);
    request.onerror = () => reject(request.error);
  });
}

export async function loadChats() {
  try {
    const opening = indexedDB.open("trellis", 1);
    opening.onupgradeneeded = () => opening.result.createObjectStore("chats", { keyPath: "id" });
    database = await asked(opening);
    const chats = await asked(database.transaction("chats").objectStore("chats").getAll());
    // What was coming when the page was closed has ended there.
    for (const node of chats.flatMap((chat) => Object.values(chat.nodes))) {
      if (node.state === "waiting" || node.state === "streaming") node.state = "stopped";
    }
    app.chats = chats.sort((one, other) => other.updated - one.updated);
  } catch (error) {
    console.warn("chats are not kept:", error);
  }
  changed();
}

export async function saveChat(chat) {
  chat.updated = Date.now();
  if (!app.chats.includes(chat)) app.chats.unshift(chat);
  app.chats.sort((one, other) => other.updated - one.updated);
  changed();
  if (database) await asked(database.transaction("chats", "readwrite").objectStore("chats").put(chat));
}

export async function deleteChat(chat) {
  app.chats = app.chats.filter((other) => other !== chat);
  changed();
  if (database) await asked(database.transaction("chats", "readwrite").objectStore("chats").delete(chat.id));
}
