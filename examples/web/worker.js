// The library runs here, so that the page stays quick while it computes. A request is {id, name, args}; its answer has the
// same id and a value or an error. While it trains, {progress} comes after each step.
import init, * as lab from "./lab.js";

// A shader that the browser rejects shows up nowhere but on the console: the page must know of it.
for (const level of ["error", "warn"]) {
  const original = console[level].bind(console);
  console[level] = (...args) => {
    original(...args);
    postMessage({ log: level, text: args.map(String).join(" ") });
  };
}

const reason = (e) => (e instanceof Error ? e.message : String(e));
const turn = () => new Promise((resolve) => setTimeout(resolve));
const ready = init();
let stopping = false;

async function train(options, steps, every) {
  stopping = false;
  const run = await lab.Training.create(JSON.stringify(options));
  try {
    const size = run.size();
    for (let step = 0; step < steps && !stopping; step++) {
      const begun = performance.now();
      const result = JSON.parse(await run.step());
      const ms = performance.now() - begun;
      const sample = (step + 1) % every === 0 || step + 1 === steps ? await run.say(48) : undefined;
      postMessage({ progress: { ...result, size, ms, sample } });
      // Messages, such as a wish to stop, come in between two steps.
      await turn();
    }
  } finally {
    run.free();
  }
}

// The files that were opened last.
let opened;
function open(names, files) {
  const next = lab.Files.open(names, files);
  opened?.free();
  opened = next;
  return opened.list();
}

const here = { train, open, stop: () => void (stopping = true), values: (file, name) => opened.values(file, name), gpu };

/** Whether this browser has WebGPU: the interface, and an adapter behind it. */
async function gpu() {
  return Boolean(await navigator.gpu?.requestAdapter());
}

onmessage = async ({ data: { id, name, args } }) => {
  try {
    await ready;
    postMessage({ id, value: await (here[name] ?? lab[name])(...args) });
  } catch (e) {
    // After a trap the module's memory is not to be trusted.
    postMessage({ id, error: reason(e), broken: e instanceof WebAssembly.RuntimeError });
  }
};
