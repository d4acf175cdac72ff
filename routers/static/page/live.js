// Live figures of the server, from its metrics: a strip in the header, charts and replicas below it.

import uPlot from "../vendor/uPlot.esm.js";
import { ApiError, getJson, request } from "./api.js";
import { html, Widget } from "./html.js";
import { app, changed } from "./store.js";

const PAUSE_MS = 2000;
const KEPT = 150; // samples: five minutes

// Names of metrics; a test compares them with the server's.
const METRICS = {
  running: "trtllm_num_requests_running",
  waiting: "trtllm_num_requests_waiting",
  kv: "trtllm_kv_cache_utilization",
  generated: "trtllm_generation_tokens_total",
  drawing: "trellis_visual_running",
  toDraw: "trellis_visual_waiting",
  steps: "trellis_visual_steps_total",
  info: "trellis_info",
  ready: "trellis_ready",
  routed: "trtllm_router_requests_in_flight",
  routedAvailable: "trtllm_router_replica_available",
  prefillAvailable: "trtllm_prefill_peer_available",
  encodeAvailable: "trtllm_encode_peer_available",
};

// Returns the samples of a page of metrics: {name: [{labels, value}]}.
export function parseMetrics(text) {
  const metrics = {};
  for (const line of text.split("\n")) {
    const found = /^([a-z_:]+)(?:\{(.*)\})? (\S+)/i.exec(line);
    if (!found) continue;
    const labels = Object.fromEntries([...(found[2] || "").matchAll(/(\w+)="((?:[^"\\]|\\.)*)"/g)].map(([, name, value]) => [name, value]));
    (metrics[found[1]] ??= []).push({ labels, value: Number(found[3]) });
  }
  return metrics;
}

// Returns what the strip and the charts show; undefined where the server has no such figure.
function figures(metrics, before) {
  const samples = (name) => metrics[METRICS[name]] || [];
  const sum = (name) => (samples(name).length ? samples(name).reduce((total, { value }) => total + value, 0) : undefined);
  const now = {
    at: Date.now() / 1000,
    running: sum("drawing") ?? sum("running") ?? sum("routed"),
    waiting: sum("toDraw") ?? sum("waiting"),
    kv: sum("kv"),
    generated: sum("steps") ?? sum("generated"),
    unit: sum("steps") === undefined ? "tokens/s" : "steps/s",
    role: samples("info")[0]?.labels.role,
    replicas: replicas(samples),
  };
  const passed = before && now.generated !== undefined ? now.generated - before.generated : NaN;
  // Less than before: the server was started anew.
  if (passed >= 0) now.speed = passed / (now.at - before.at);
  return now;
}

// The replicas that this one asks: {name, role, available, running}.
function replicas(samples) {
  const running = Object.fromEntries(samples("routed").map(({ labels, value }) => [labels.replica, value]));
  const rows = (name, label, role) =>
    samples(name).map(({ labels, value }) => ({ name: labels[label], role, available: value > 0, running: running[labels[label]] }));
  return [
    ...rows("routedAvailable", "replica", "replica"),
    ...rows("prefillAvailable", "peer", "prefill"),
    ...rows("encodeAvailable", "peer", "encode"),
  ];
}

// Reads the metrics again and again, while somebody looks.
export async function watchServer() {
  for (;;) {
    if (document.visibilityState === "visible" && !app.keyWanted) await look();
    await new Promise((resolve) => setTimeout(resolve, PAUSE_MS));
  }
}

export async function look() {
  try {
    const metrics = parseMetrics(await (await request("metrics")).text());
    app.live.now = figures(metrics, app.live.now);
    app.live.history = [...app.live.history, app.live.now].slice(-KEPT);
    app.health = metrics[METRICS.ready]?.every(({ value }) => value) ? "" : await health();
  } catch (error) {
    if (!(error instanceof ApiError)) throw error;
    app.live.now = null;
    app.health = error.message;
    if (error.status === 401) app.keyWanted = true;
  }
  changed();
}

// Why the server is not ready; empty if it is.
async function health() {
  try {
    await getJson("health/ready");
    return "";
  } catch (error) {
    if (error instanceof ApiError) return error.message;
    throw error;
  }
}

export function Strip() {
  const { now, history } = app.live;
  if (!now) return null;
  const { running, waiting, kv, speed, unit, role } = now;
  const available = now.replicas.filter((replica) => replica.available).length;
  const toggle = () => {
    app.chartsShown = !app.chartsShown;
    changed();
  };
  return html`<button type="button" class="strip" aria-expanded=${app.chartsShown} aria-controls="charts" onClick=${toggle} title="Show charts">
    <${Figure} name="running" value=${running} />
    <${Figure} name="waiting" value=${waiting} />
    <${Figure} name="KV cache" value=${kv === undefined ? undefined : `${(100 * kv).toFixed(kv < 0.1 ? 1 : 0)} %`} />
    <${Figure} name=${unit} value=${speed === undefined ? undefined : speed.toFixed(speed < 10 ? 1 : 0)} />
    <${Spark} values=${history.map((sample) => sample.speed || 0)} />
    ${role && html`<span class="figure"><b>${role}</b></span>`}
    ${now.replicas.length > 0 && html`<${Figure} name="replicas" value=${`${available}/${now.replicas.length}`} />`}
  </button>`;
}

function Figure({ name, value }) {
  return value === undefined ? null : html`<span class="figure"><b>${value}</b> <span>${name}</span></span>`;
}

// Tokens or steps a second of the last two minutes, as a line.
function Spark({ values }) {
  const last = values.slice(-60);
  const most = Math.max(...last, 1);
  const points = last.map((value, index) => `${80 - ((last.length - 1 - index) / 59) * 80},${19 - (value / most) * 18}`).join(" ");
  return html`<svg class="spark" viewBox="0 0 80 20" aria-hidden="true"><polyline points=${points} /></svg>`;
}

export function Charts() {
  const { history, now } = app.live;
  const column = (name) => history.map((sample) => sample[name] ?? null);
  const times = column("at");
  return html`<section id="charts" aria-label="Live figures" tabindex="0" hidden=${!app.chartsShown}>
    ${app.chartsShown &&
    html`<div class="grid">
        <${Chart} title=${now?.unit === "steps/s" ? "Steps/s" : "Tokens/s"} data=${[times, column("speed")]} names=${[now?.unit]} />
        <${Chart} title="Requests" data=${[times, column("running"), column("waiting")]} names=${["running", "waiting"]} />
        ${now?.kv !== undefined &&
        html`<${Chart} title="KV cache in use, %" data=${[times, column("kv").map((share) => share && share * 100)]} names=${["KV cache"]} />`}
      </div>
      ${now?.replicas.length > 0 &&
      html`<table>
        <caption>Replicas that this one asks</caption>
        <thead>
          <tr>
            <th scope="col">replica</th>
            <th scope="col">role</th>
            <th scope="col">state</th>
            <th scope="col">running</th>
          </tr>
        </thead>
        <tbody>
          ${now.replicas.map(
            ({ name, role, available, running }) =>
              html`<tr>
                <td>${name}</td>
                <td>${role}</td>
                <td>${available ? "available" : "not available"}</td>
                <td>${running ?? ""}</td>
              </tr>`,
          )}
        </tbody>
      </table>`}`}
  </section>`;
}

// A chart of uPlot's, in the colours of the theme.
class Chart extends Widget {
  componentDidMount() {
    this.observer = new ResizeObserver(() => this.plot?.setSize(this.size()));
    this.observer.observe(this.element.querySelector(".plot"));
    this.create();
  }

  componentDidUpdate() {
    if (this.theme !== colour("--text")) this.create();
    else this.plot.setData(this.props.data);
  }

  componentWillUnmount() {
    this.observer.disconnect();
    this.plot.destroy();
  }

  size() {
    return { width: this.element.querySelector(".plot").clientWidth, height: 110 };
  }

  create() {
    this.plot?.destroy();
    this.theme = colour("--text");
    const axis = { stroke: colour("--muted"), grid: { stroke: colour("--line"), width: 1 }, ticks: { show: false } };
    const strokes = [colour("--accent"), colour("--warm")];
    const options = {
      ...this.size(),
      legend: { show: false },
      cursor: { show: false },
      scales: { y: { range: (plot, low, high) => [0, Math.max(high, 1) * 1.1] } },
      axes: [
        { ...axis, size: 26, space: 80, values: (plot, seconds) => seconds.map(clock) },
        { ...axis, size: 40, space: 30 },
      ],
      series: [{}, ...this.props.names.map((label, index) => ({ label, stroke: strokes[index], width: 2, points: { show: false } }))],
    };
    this.plot = new uPlot(options, this.props.data, this.element.querySelector(".plot"));
  }

  render({ title, names, data }) {
    const last = data.slice(1).map((values) => values.at(-1));
    const text = names.map((name, index) => `${name} ${last[index] === null ? "unknown" : Math.round(last[index] * 10) / 10}`).join(", ");
    return html`<figure class="chart" ref=${this.ref}>
      <figcaption>${title}${names.length > 1 && names.map((name, index) => html` <i class=${`line-${index}`}></i>${name}`)}</figcaption>
      <div class="plot" role="img" aria-label=${`${title}: ${text}`}></div>
    </figure>`;
  }
}

function clock(seconds) {
  return new Date(seconds * 1000).toLocaleTimeString([], { hour12: false });
}

// A colour of page.css as a canvas takes it: as computed for the theme.
function colour(name) {
  const probe = document.createElement("i");
  probe.style.color = `var(${name})`;
  document.body.append(probe);
  const computed = getComputedStyle(probe).color;
  probe.remove();
  return computed;
}
