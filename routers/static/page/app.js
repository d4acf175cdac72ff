// The page: what it consists of, its keys, and what happens when it opens.
//
//   app.js       layout, list of chats, key          store.js   state, what is kept in the browser
//   composer.js  writing a message                   chats.js   a chat as a tree of branches
//   message.js   a turn of the chat                  run.js     asking for answers
//   parts.js     what an answer consists of          fields.js  the request's fields, from /openapi.json
//   inspect.js   what is behind an answer            api.js     HTTP, key.js the key
//   settings.js  the settings                        live.js    figures from /metrics
//   tasks.js     transcripts, pictures and videos    record.js  the microphone

import { ApiError, getJson } from "./api.js";
import { shownPath } from "./chats.js";
import { addFiles, Composer } from "./composer.js";
import { html, render, Widget } from "./html.js";
import { getKey, setKey } from "./key.js";
import { Charts, look, Strip, watchServer } from "./live.js";
import { Turn } from "./message.js";
import { chooseTask, isRunning, openNewChat, stop } from "./run.js";
import { Settings } from "./settings.js";
import { app, applyTheme, changed, deleteChat, loadChats, onChange, setTheme } from "./store.js";
import { TASKS, tasksOf } from "./tasks.js";

const THEMES = { auto: "light", light: "dark", dark: "auto" }; // which comes next
const RETRY_MS = 1000;

function toggleDrawer(name) {
  if (name === "settings" && !matchMedia("(max-width: 1000px)").matches) app.settingsShown = !app.settingsShown;
  else app.opened = app.opened === name ? "" : name;
  changed();
}

function Header() {
  const runtime = app.model?.runtime;
  const facts = [runtime?.backend, runtime?.device, runtime?.dtype].filter((fact) => fact && fact !== "none");
  return html`<header class="top">
    <button type="button" class="quiet icon narrow" aria-label="Chats" aria-expanded=${app.opened === "chats"} onClick=${() => toggleDrawer("chats")}>
      ☰
    </button>
    <h1>Trellis</h1>
    <p class="model" title=${facts.join(", ")}>
      ${app.model ? html`<b>${app.model.id}</b> <span>${facts.join(" · ")}</span>` : "connecting…"}
    </p>
    <${Strip} />
    <button type="button" class="quiet" onClick=${() => setTheme(THEMES[app.theme])} aria-label=${`Colours: ${app.theme}`} title="Colours">
      ${{ auto: "◐", light: "☀", dark: "☾" }[app.theme]}
    </button>
    ${getKey() && html`<button type="button" class="quiet" onClick=${changeKey}>Key</button>`}
    <a class="quiet" href="docs">API</a>
    <button type="button" class="quiet" aria-controls="settings" aria-expanded=${app.settingsShown} onClick=${() => toggleDrawer("settings")}>
      Settings
    </button>
  </header>`;
}

function Chats() {
  const open = (chat) => {
    app.chat = chat;
    app.editing = "";
    app.opened = "";
    changed();
  };
  const remove = (chat) => {
    if (!confirm(`Delete "${chat.title}"?`)) return;
    stop(chat);
    deleteChat(chat);
    if (chat === app.chat) openNewChat();
  };
  return html`<nav id="chats" class="drawer" aria-label="Chats">
    <button type="button" class="primary" onClick=${startChat} title="Alt+N">New chat</button>
    <ul>
      ${app.chats.map(
        (chat) =>
          html`<li key=${chat.id}>
            <button type="button" class="open" aria-current=${chat === app.chat} onClick=${() => open(chat)}>${chat.title}</button>
            <button type="button" class="quiet" aria-label=${`Delete ${chat.title}`} onClick=${() => remove(chat)}>×</button>
          </li>`,
      )}
    </ul>
    <p class="about">Chats are kept in this browser only.</p>
  </nav>`;
}

// The messages. It follows the newest text, unless somebody has scrolled up.
class Messages extends Widget {
  follows = true;

  onScroll = () => {
    const { scrollTop, scrollHeight, clientHeight } = this.element;
    this.follows = scrollHeight - scrollTop - clientHeight < 60;
  };

  // A picture has its height once it is loaded.
  onLoad = () => {
    if (this.follows) this.element.scrollTop = this.element.scrollHeight;
  };

  componentDidUpdate(before) {
    const { chat } = this.props;
    const opened = before.chat !== chat;
    const busy = isRunning(chat);
    if (opened) this.follows = true;
    if (opened || (this.follows && (busy || this.wasBusy))) this.element.scrollTop = this.element.scrollHeight;
    this.wasBusy = busy;
  }

  render({ chat }) {
    const path = shownPath(chat);
    return html`<div class="messages" ref=${this.ref} role="log" aria-live="off" aria-label="Messages" tabindex="0" onScroll=${this.onScroll} onLoadCapture=${this.onLoad} onLoadedMetadataCapture=${this.onLoad}>
      ${path.length
        ? path.map((node) => html`<${Turn} key=${node.parent} chat=${chat} node=${node} />`)
        : html`<${Welcome} />`}
    </div>`;
  }
}

function Welcome() {
  const guides = app.model?.runtime.guides.length;
  const [title, about] = app.model ? TASKS[app.task].welcome(app.model) : ["Trellis", ""];
  return html`<div class="welcome">
    <h2>${title}</h2>
    <p>${about}${guides > 0 && app.task === "chat" && " Structured output is in the settings."}</p>
    <p class="about"><kbd>Enter</kbd> sends, <kbd>Shift</kbd>+<kbd>Enter</kbd> begins a line, <kbd>Esc</kbd> stops, <kbd>Alt</kbd>+<kbd>N</kbd> opens a new chat.</p>
  </div>`;
}

class KeyForm extends Widget {
  componentDidMount() {
    this.element.querySelector("input").focus();
  }

  submit = (event) => {
    event.preventDefault();
    setKey(this.element.querySelector("input").value.trim());
    app.keyWanted = false;
    connect();
  };

  render() {
    return html`<form class="key" ref=${this.ref} onSubmit=${this.submit}>
      <label for="key">${getKey() ? "The server does not know this API key." : "This server needs an API key."}</label>
      <div class="row">
        <input id="key" type="password" autocomplete="off" required />
        <button class="primary">Connect</button>
      </div>
      <p class="about">The key stays in this tab and ends with it.</p>
    </form>`;
  }
}

function App() {
  const classes = ["page", app.opened && `opened-${app.opened}`, !app.settingsShown && "no-settings"];
  return html`<div class=${classes.filter(Boolean).join(" ")}>
    <${Header} />
    <${Charts} />
    <${Chats} />
    <main>
      ${app.health && !app.keyWanted && html`<p class="health" role="status">${app.health}</p>`}
      ${app.keyWanted ? html`<${KeyForm} />` : html`<${Messages} chat=${app.chat} />`}
      <${Composer} />
    </main>
    <${Settings} />
    ${app.opened && html`<button type="button" class="shade" aria-label="Close" onClick=${() => toggleDrawer(app.opened)}></button>`}
    <p class="unseen" role="status">${app.notice}</p>
  </div>`;
}

function startChat() {
  openNewChat();
  app.opened = "";
  document.querySelector(".composer textarea")?.focus();
}

function changeKey() {
  setKey("");
  app.model = null;
  app.keyWanted = true;
  changed();
}

// Asks the server what it serves, until it says.
async function connect() {
  while (!app.keyWanted && !app.model) {
    try {
      app.document = await getJson("openapi.json");
      app.model = (await getJson("v1/models")).data[0];
      chooseTask(tasksOf(app.model)[0]);
      document.title = `${app.model.id} · Trellis`;
      await look();
    } catch (error) {
      if (!(error instanceof ApiError)) throw error;
      app.health = error.message;
      app.keyWanted = error.status === 401;
      await new Promise((resolve) => setTimeout(resolve, RETRY_MS));
    }
    changed();
  }
}

document.addEventListener("keydown", (event) => {
  if (event.key === "Escape") {
    if (app.opened) toggleDrawer(app.opened);
    else if (isRunning(app.chat)) stop(app.chat);
  }
  if (event.altKey && event.code === "KeyN") {
    event.preventDefault();
    startChat();
  }
});

document.addEventListener("dragover", (event) => {
  event.preventDefault();
  document.documentElement.classList.add("dropping");
});
document.addEventListener("dragleave", (event) => {
  if (!event.relatedTarget) document.documentElement.classList.remove("dropping");
});
document.addEventListener("drop", (event) => {
  event.preventDefault();
  document.documentElement.classList.remove("dropping");
  addFiles(event.dataTransfer.files);
});

applyTheme();
openNewChat();
onChange(() => render(html`<${App} />`, document.getElementById("app")));
loadChats();
connect();
watchServer();
