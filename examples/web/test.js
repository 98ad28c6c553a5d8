// A user's visit to the page, in a real browser: chooses, presses, reads the numbers, and holds them against what the library
// gives natively (expected.json, which `cargo test --test lab` keeps true). The first thing that is wrong ends it.
const post = (path, body) => fetch(path, { method: "POST", body: JSON.stringify(body) }).catch(() => {});
const say = (text) => post("/log", { level: "info", text });
const wait = (ms) => new Promise((resolve) => setTimeout(resolve, ms));
const query = new URLSearchParams(location.search);
const frame = document.querySelector("iframe");

function must(condition, what) {
  if (!condition) throw new Error(what);
}
/** What `look` gives as soon as it gives something. */
async function until(what, seconds, look) {
  const end = performance.now() + 1000 * seconds;
  for (;;) {
    const found = look();
    if (found) return found;
    must(performance.now() < end, `${what}: not within ${seconds} s`);
    await wait(50);
  }
}

let page, $;
async function visit(address) {
  frame.src = address;
  await until("the page", 30, () => frame.contentDocument?.readyState === "complete" && frame.contentWindow.location.pathname.endsWith("index.html"));
  page = frame.contentWindow;
  $ = (selector) => page.document.querySelector(selector);
  // Whatever leaves the page, or tries to.
  page.document.addEventListener("securitypolicyviolation", (e) => void (page.refused ??= `${e.violatedDirective} ${e.blockedURI}`));
  page.addEventListener("error", (e) => void (page.wrong ??= e.message));
  page.addEventListener("unhandledrejection", (e) => void (page.wrong ??= String(e.reason)));
  await until("the library", 60, () => page.document.body.dataset.ready);
}
const tab = async (name) => {
  $(`#tab-${name}`).click();
  await until(`tab ${name}`, 5, () => !$(`#${name}`).hidden);
};
function fill(selector, value) {
  const field = $(selector);
  must(field, `no field ${selector}`);
  field.value = value;
  field.dispatchEvent(new page.Event(field.tagName === "SELECT" ? "change" : "input", { bubbles: true }));
}
const number = (selector) => Number($(selector).textContent.replaceAll(",", ""));
const close = (a, b, within) => Math.abs(a - b) <= within;
/** Puts files into the field as if they had been chosen. */
async function choose(selector, names) {
  const list = new page.DataTransfer();
  for (const name of names) {
    const blob = await (await fetch("samples/" + name)).blob();
    list.items.add(new page.File([blob], name));
  }
  $(selector).files = list.files;
  $(selector).dispatchEvent(new page.Event("change"));
}
function fits(width) {
  const over = page.document.documentElement.scrollWidth - page.document.documentElement.clientWidth;
  must(over <= 0, `at a width of ${width} the page is ${over} pixels too wide`);
}

async function rules(expected) {
  for (const { mesh, op, inputs, attrs, bytes, outputs } of expected) {
    fill("#rule [name=op]", op);
    fill("#rule [name=mesh]", mesh);
    const fields = [...page.document.querySelectorAll("#rule [data-operand]")];
    must(fields.length >= inputs.length, `${op} has ${fields.length} fields for ${inputs.length} operands`);
    fields.forEach((field, n) => void (field.value = inputs[n] ?? ""));
    fill("#rule [name=attrs]", JSON.stringify(attrs));
    $("#rule .result").replaceChildren();
    $("#rule [type=submit]").click();
    await until(`the rule of ${op}`, 20, () => $("#rule .outputs") || $("#rule .error"));
    must(!$("#rule .error"), `${op}: ${$("#rule .error")?.textContent}`);
    must(number("#rule [data-number=bytes]") === bytes, `${op}: ${number("#rule [data-number=bytes]")} bytes, natively ${bytes}`);
    must($("#rule .outputs").textContent === outputs.join("\n"), `${op}: ${$("#rule .outputs").textContent}, natively ${outputs}`);
    must($("#rule .cards svg"), `${op}: no picture`);
  }
  fill("#rule [name=mesh]", "dp=two");
  $("#rule [type=submit]").click();
  await until("an error about the mesh", 10, () => $("#rule .error")?.textContent.includes("two"));
}

async function plans(expected) {
  for (const { mesh, from, to, bytes, steps } of expected) {
    for (const [name, value] of Object.entries({ mesh, from, to })) fill(`#reshard [name=${name}]`, value);
    $("#reshard .result").replaceChildren();
    $("#reshard [type=submit]").click();
    await until("a plan", 20, () => $("#reshard table") || $("#reshard .error"));
    must(!$("#reshard .error"), $("#reshard .error")?.textContent);
    must(number("#reshard [data-number=bytes]") === bytes, `${from} to ${to}: ${number("#reshard [data-number=bytes]")} bytes, natively ${bytes}`);
    must(page.document.querySelectorAll("#reshard tbody tr").length === steps, `${from} to ${to}: not ${steps} steps`);
  }
  const first = $("#reshard .stage p").textContent;
  $("#reshard .player button").click();
  await until("the reshard to move", 10, () => $("#reshard .stage p").textContent !== first);
}

async function trains({ device, steps, mesh, losses, within }) {
  fill("#train [name=mesh]", mesh);
  fill("#train [name=device]", device);
  fill("#train [name=steps]", String(steps));
  page.document.querySelector("#train").losses = undefined;
  $("#train [type=submit]").click();
  await until(`training on ${device}`, Number(query.get("patience") ?? 300), () => $("#train").losses);
  must(!$("#train .message.error"), $("#train .message")?.textContent);
  const seen = $("#train").losses;
  must(seen.length === steps, `${seen.length} steps, not ${steps}`);
  const off = Math.max(...seen.map((loss, n) => Math.abs(loss - losses[n])));
  must(off <= within, `${device}, ${mesh}: losses differ from the native ones by ${off}`);
  must($("#train .curve svg") && $("#train .ledger svg"), "no curve or no ledger");
  must(number("#train [data-number=step]") === steps, "the page shows another step");
  return `${device} on mesh(${mesh}): ${steps} steps, ${$("#train [data-number=ms]").textContent} ms each, losses differ from the native ones by ${off.toExponential(1)}, it says ${JSON.stringify($("#train .sample").textContent.slice(0, 32))}`;
}

async function opens(expected) {
  for (const { files, tensors, look, shows } of expected) {
    fill("#files [name=find]", "");
    await wait(100);
    $("#files .result").replaceChildren();
    await choose("#files [name=files]", files);
    await until(`${files[0]} to open`, 20, () => $("#files [data-number=tensors]") || $("#files .error"));
    must(!$("#files .error"), $("#files .error")?.textContent);
    must(number("#files [data-number=tensors]") === tensors, `${files[0]}: ${number("#files [data-number=tensors]")} tensors, natively ${tensors}`);
    fill("#files [name=find]", look);
    await wait(100);
    const button = await until(look, 10, () => [...page.document.querySelectorAll("#files td button")].find((b) => b.textContent === look));
    button.click();
    await until(`the values of ${look}`, 20, () => $("#files .detail svg") || $("#files .detail .error"));
    must($("#files .detail").textContent.includes(shows), `${look}: ${$("#files .detail").textContent.slice(0, 200)}, not ${shows}`);
  }
  await choose("#files [name=files]", ["expected.json"]);
  await until("an error about what is no checkpoint", 10, () => $("#files .error"));
}

async function keyboard() {
  const first = $("#tab-rule");
  first.focus();
  first.dispatchEvent(new page.KeyboardEvent("keydown", { key: "ArrowRight", bubbles: true }));
  must(!$("#reshard").hidden && page.document.activeElement === $("#tab-reshard"), "the arrow key does not go to the next tab");
  const fields = [...page.document.querySelectorAll("main input, main select, main textarea, main button")];
  const nameless = fields.filter((f) => !(f.labels?.length || f.getAttribute("aria-label") || f.textContent.trim()));
  must(!nameless.length, `fields without a name: ${nameless.map((f) => f.outerHTML)}`);
}

try {
  const expected = await (await fetch("samples/expected.json")).json();
  const report = [];
  await visit("index.html");
  report.push(`ready after ${page.document.body.dataset.ready} ms`);
  await keyboard();
  await tab("rule");
  await rules(expected.rules);
  fits(1200);
  await tab("reshard");
  await plans(expected.plans);
  fits(1200);
  await tab("files");
  await opens(expected.files);
  fits(1200);
  await tab("train");
  report.push(await trains({ ...expected.training, steps: 12, device: "cpu" }));
  const gpu = !$("#train [name=device]").options[0].disabled;
  must(gpu || query.get("gpu") === "0", "the browser has no WebGPU");
  // A software adapter takes seconds for a step on a mesh, as an unoptimised module does: the long run is on the GPU's one rank.
  if (gpu) report.push(await trains({ ...expected.training, steps: 4, device: "gpu" }), await trains({ ...expected.training, mesh: "dp=1", device: "gpu" }));
  fits(1200);
  must(page.performance.getEntriesByType("resource").every((r) => r.name.startsWith(location.origin)), "something was fetched from elsewhere");
  must(!page.refused, `the content security policy refused ${page.refused}`);
  must(!page.wrong, `the page failed: ${page.wrong}`);
  const status = $("#status").textContent;
  must(!$("#status").classList.contains("error"), status);
  frame.width = 360;
  await wait(300);
  for (const name of ["rule", "reshard", "train", "files"]) {
    await tab(name);
    fits(360);
  }
  await post("/result", { ok: true, text: report.join("\n") });
} catch (e) {
  await post("/result", { ok: false, text: (e instanceof Error && e.stack) || String(e) });
}
