// The page: forms, and what the library (worker.js) answers. No framework, no request but for the files of this folder.

const $ = (selector, from = document) => from.querySelector(selector);
const status = $("#status");

// --- The library, in a worker. One that broke is replaced by a fresh one.

let worker, waiting, next = 0;
let onProgress = () => {};
function start() {
  waiting = new Map();
  worker = new Worker("worker.js", { type: "module" });
  worker.onmessage = ({ data }) => {
    if (data.progress) return onProgress(data.progress);
    if (data.log) return data.log === "error" ? deviceFailed(data.text) : undefined;
    const { resolve, reject } = waiting.get(data.id) ?? {};
    waiting.delete(data.id);
    if (data.error === undefined) return resolve?.(data.value);
    reject?.(new Error(data.error));
    if (data.broken) restart("The library stopped: " + data.error + " It was started again.");
  };
  worker.onerror = (e) => restart("The library stopped: " + (e.message || "it could not be loaded") + ".");
}
function restart(text) {
  worker.terminate();
  for (const { reject } of waiting.values()) reject(new Error(text));
  start();
  status.textContent = text;
}
const ask = (name, ...args) =>
  new Promise((resolve, reject) => {
    const id = next++;
    waiting.set(id, { resolve, reject });
    worker.postMessage({ id, name, args });
  });
function deviceFailed(text) {
  status.textContent = "The GPU reported an error, numbers may be wrong: " + text.split("\n")[0];
  status.classList.add("error");
}

// --- Pieces of a page

/** element("td", {class: "number"}, "text" or nodes ...) */
function element(name, attributes = {}, ...children) {
  const made = document.createElement(name);
  for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
  made.append(...children);
  return made;
}
/** A picture of the library as a node. Its style is adopted by the page below: one that came with it would be refused. */
function picture(svg) {
  const bare = svg.replace(/<style>[^]*?<\/style>/, "");
  const made = new DOMParser().parseFromString(bare, "image/svg+xml").documentElement;
  const box = element("div", { class: "picture" });
  box.append(document.importNode(made, true));
  return box;
}
function table(head, rows) {
  const cell = (kind, [text, number]) =>
    element(kind, number ? { class: "number" } : {}, text instanceof Node ? text : String(text));
  const lines = rows.map(({ cells, chosen }) =>
    element("tr", chosen ? { class: "chosen" } : {}, ...cells.map((c) => cell("td", c))));
  return element("div", { class: "scroll" },
    element("table", {}, element("thead", {}, element("tr", {}, ...head.map((c) => cell("th", c)))), element("tbody", {}, ...lines)));
}
const grouped = (n) => Number(n).toLocaleString("en");
function bytes(n) {
  const units = ["B", "KiB", "MiB", "GiB", "TiB"];
  let at = 0;
  while (n >= 1024 && at < units.length - 1) (n /= 1024), at++;
  return (at ? n.toFixed(n < 10 ? 2 : 1) : n) + " " + units[at];
}
/** Shows what `work` answers in the panel, or its error. Only the newest answer counts. */
function showing(panel, work) {
  const result = $(".result", panel), mine = (panel.newest = (panel.newest ?? 0) + 1);
  return work().then(
    (nodes) => panel.newest === mine && result.replaceChildren(...nodes),
    (e) => panel.newest === mine && result.replaceChildren(element("p", { class: "error", role: "alert" }, e.message)));
}
const values = (form) => Object.fromEntries(new FormData(form));

// --- Tabs: arrows go through them, as everywhere.

const tabs = [...document.querySelectorAll("[role=tab]")];
function choose(tab) {
  for (const other of tabs) {
    other.setAttribute("aria-selected", other === tab);
    other.tabIndex = other === tab ? 0 : -1;
    $("#" + other.getAttribute("aria-controls")).hidden = other !== tab;
  }
}
for (const [n, tab] of tabs.entries()) {
  tab.onclick = () => choose(tab);
  tab.onkeydown = (e) => {
    const by = { ArrowRight: 1, ArrowLeft: -1 }[e.key];
    if (!by) return;
    const to = tabs[(n + by + tabs.length) % tabs.length];
    choose(to);
    to.focus();
  };
}

// --- Rules

const rule = $("#rule"), ruleForm = $("form", rule);
function fillOperands(op) {
  const operands = op.operands.map(({ name, type }) =>
    element("label", {}, name + " ", Object.assign(element("input", { spellcheck: "false", autocomplete: "off", "data-operand": name }), { value: type })));
  $(".operands", rule).replaceChildren(...operands);
  ruleForm.elements.attrs.value = JSON.stringify(op.attrs);
}
function explain() {
  const { mesh, op, attrs } = values(ruleForm);
  const inputs = [...ruleForm.querySelectorAll("[data-operand]")].map((i) => i.value.trim() || null);
  return showing(rule, async () => {
    const answer = JSON.parse(await ask("rule", JSON.stringify({ mesh, op, attrs, inputs })));
    const nodes = [element("h2", {}, "The rule"), element("pre", { class: "rule" }, answer.rule)];
    for (const d of answer.decisions) {
      nodes.push(element("h2", {}, d.title), element("pre", {}, d.rule),
        table([["", 0], ["bytes received", 1], ["owed", 1], ["mesh axes", 0], ["operands", 0]],
          d.choices.map((c, n) => ({ chosen: n === 0, cells: [[n ? "or" : "chosen", 0], [grouped(c.bytes), 1], [grouped(c.owed), 1], [c.axes, 0], [c.inputs, 0]] }))));
    }
    nodes.push(element("h2", {}, "Results"), element("pre", { class: "outputs" }, answer.outputs.join("\n")),
      element("p", {}, "Received by the rank that receives most: ", element("strong", { "data-number": "bytes" }, grouped(answer.bytes)), " bytes."));
    if (answer.ledger) nodes.push(picture(answer.ledger));
    nodes.push(element("h2", {}, "Who holds what"), element("div", { class: "cards" }, ...answer.pictures.map(picture)));
    return nodes;
  });
}
ruleForm.onsubmit = (e) => { e.preventDefault(); explain(); };

// --- Resharding

const reshard = $("#reshard"), reshardForm = $("form", reshard);
let playing;
function plan() {
  clearInterval(playing);
  return showing(reshard, async () => {
    const answer = JSON.parse(await ask("plan", JSON.stringify(values(reshardForm))));
    const stage = element("div", { class: "stage", "aria-live": "polite" });
    const at = element("input", { type: "range", min: 0, max: answer.states.length - 1, value: 0, "aria-label": "step" });
    const draw = () => stage.replaceChildren(element("p", {}, answer.states[at.value].title), picture(answer.states[at.value].picture));
    at.oninput = draw;
    const button = element("button", { type: "button" }, "Play");
    button.onclick = () => {
      clearInterval(playing);
      at.value = 0;
      draw();
      playing = setInterval(() => {
        if (Number(at.value) >= answer.states.length - 1) return clearInterval(playing);
        at.value = Number(at.value) + 1;
        draw();
      }, 900);
    };
    draw();
    return [
      element("p", {}, "The rank that receives most receives ", element("strong", { "data-number": "bytes" }, grouped(answer.bytes)), " bytes",
        answer.bound === null ? "." : "; no way receives less than " + grouped(answer.bound) + "."),
      table([["step", 0], ["over", 0], ["becomes", 0], ["bytes received", 1]],
        answer.steps.map((s) => ({ cells: [[s.kind, 0], [s.axes, 0], [s.to, 0], [grouped(s.bytes), 1]] }))),
      element("h2", {}, "Watch it"), element("div", { class: "player" }, button, at), stage,
    ];
  });
}
reshardForm.onsubmit = (e) => { e.preventDefault(); plan(); };

// --- Training

const train = $("#train"), trainForm = $("form", train);
const message = $(".message", train), number = (name) => $(`[data-number=${name}]`, train);
trainForm.elements.text.value =
  "one program runs on any mesh. a mesh has axes, and each axis cuts the tensors or leaves them whole. " +
  "the same program gives the same numbers on one device and on many. what moves is written down, byte by byte. " +
  "a sum may stay in parts until somebody needs it whole. nothing moves in secret, and nothing is lost.\n";
trainForm.elements.stop.onclick = () => ask("stop");
trainForm.onsubmit = async (e) => {
  e.preventDefault();
  const options = values(trainForm), steps = Number(options.steps), losses = [];
  const busy = (yes) => { $("[type=submit]", trainForm).disabled = yes; trainForm.elements.stop.disabled = !yes; };
  busy(true);
  message.className = "message";
  message.textContent = "Preparing: the first step builds the kernels ...";
  const times = [];
  onProgress = async (p) => {
    losses.push(p.loss);
    times.push(p.ms);
    message.textContent = "Training on " + p.device + ".";
    number("step").textContent = losses.length;
    number("loss").textContent = p.loss.toFixed(4);
    // The first step builds kernels, and would hide how long the others take.
    const known = times.slice(1).sort((a, b) => a - b);
    number("ms").textContent = (known[known.length >> 1] ?? p.ms).toFixed(0);
    number("bytes").textContent = grouped(p.bytes);
    number("size").textContent = grouped(p.size);
    if (p.sample !== undefined) $(".sample", train).textContent = p.sample;
    const last = losses.length;
    if (last % 5 === 1 || last === steps) {
      const curve = await ask("curve", JSON.stringify(losses));
      if (losses.length === last) $(".curve", train).replaceChildren(picture(curve));
    }
    if (p.ledger) $(".ledger", train).replaceChildren(picture(p.ledger));
  };
  try {
    await ask("train", options, steps, 25);
    message.textContent = "Done after " + losses.length + " steps.";
  } catch (error) {
    message.className = "message error";
    message.textContent = error.message;
  }
  train.losses = losses;
  busy(false);
};

// --- Checkpoints: the files stay files, and of those only what is shown is read.

const files = $("#files"), filesForm = $("form", files);
let opened;
async function open(list) {
  const names = list.map((file) => file.webkitRelativePath || file.name);
  const summary = JSON.parse(await ask("open", names, list));
  return { summary, tensors: summary.flatMap((s) => s.tensors) };
}
function browse() {
  return showing(files, async () => {
    const { summary, tensors } = opened, find = filesForm.elements.find.value.toLowerCase();
    const shown = tensors.filter((t) => t.name.toLowerCase().includes(find));
    const detail = element("div", { class: "detail", "aria-live": "polite" });
    const look = async (t) => {
      try {
        const view = JSON.parse(await ask("values", t.file, t.name));
        detail.replaceChildren(element("h2", {}, t.name), element("p", {}, view.title),
          view.picture ? picture(view.picture) : element("pre", {}, view.text));
      } catch (e) {
        detail.replaceChildren(element("p", { class: "error", role: "alert" }, e.message));
      }
      detail.scrollIntoView({ block: "nearest" });
    };
    const link = (t) => {
      const button = element("button", { type: "button" }, t.name);
      button.onclick = () => look(t);
      return button;
    };
    const most = 500;
    return [
      ...summary.map((s) => element("p", {}, element("strong", {}, s.name), " · ", s.title,
        s.foreign.length ? ` · ${s.foreign.length} of types that are not read here (${[...new Set(s.foreign.map((f) => f.type))].join(", ")})` : "")),
      element("p", {}, element("strong", { "data-number": "tensors" }, grouped(shown.length)), " tensors, ", bytes(shown.reduce((n, t) => n + t.bytes, 0)),
        shown.length > most ? `; the first ${most} are listed, find shows others` : ""),
      detail,
      table([["name", 0], ["dtype", 0], ["shape", 0], ["bytes", 1]],
        shown.slice(0, most).map((t) => ({ cells: [[link(t), 0], [t.dtype, 0], [t.shape.join(" × ") || "scalar", 0], [bytes(t.bytes), 1]] }))),
    ];
  });
}
const pick = (input) => async () => {
  if (!input.files.length) return;
  opened = undefined;
  await showing(files, async () => {
    opened = await open([...input.files]);
    return [];
  });
  if (opened) await browse();
};
filesForm.elements.files.onchange = pick(filesForm.elements.files);
filesForm.elements.folder.onchange = pick(filesForm.elements.folder);
filesForm.elements.find.oninput = () => opened && browse();
filesForm.onsubmit = (e) => e.preventDefault();

// --- Start

start();
try {
  const [{ ops, style }, gpu] = [JSON.parse(await ask("prepare")), await ask("gpu")];
  const sheet = new CSSStyleSheet();
  sheet.replaceSync(style);
  document.adoptedStyleSheets = [sheet];
  const select = ruleForm.elements.op;
  select.replaceChildren(...ops.map((op) => element("option", { value: op.name }, op.name)));
  select.onchange = () => fillOperands(ops.find((op) => op.name === select.value));
  select.value = "matmul";
  select.onchange();
  await Promise.all([explain(), plan()]);
  status.textContent = gpu ? "" : "This browser has no WebGPU: training runs on the CPU, in WebAssembly.";
  if (!gpu) {
    trainForm.elements.device.value = "cpu";
    trainForm.elements.device.options[0].disabled = true;
  }
  document.body.dataset.ready = Math.round(performance.now());
} catch (e) {
  status.textContent = "It could not start: " + e.message;
  status.classList.add("error");
}
