// The planner page: reads the form, asks for what the commands print as JSON, and shows it. Who answers is the server
// of `toolkit page`, or on a static page a worker that runs the same Python in the browser.
// A classic script, because browsers refuse modules to a page opened from a disk.
"use strict"

const GIB = 2 ** 30
const VERDICTS = { fits: "It fits", too_close: "Too close to call", does_not_fit: "It does not fit" }
const VERDICT_WORDS = { fits: "fits", too_close: "too close", does_not_fit: "does not fit" }
// Parts of a peak, in the order of a bar: name, and what it is.
const PARTS = {
  parameter: ["Parameters", "The weights on this GPU, in the dtype that computes; frozen ones too."],
  gradient: ["Gradients", "Gradients of the trained weights that wait for the optimizer."],
  optimizer: ["Optimizer states", "fp32 master weights and the optimizer's averages."],
  reference: ["Reference model", "A second copy of the weights, which is not trained and scores the sequences."],
  activation: ["Activations", "What the forward pass saves for the backward pass; checkpointing saves less and computes it again."],
  logits: ["Logits", "Scores of every word of the vocabulary for each token, and the loss that is computed from them."],
  buffer: ["Buffers", "Gathered layers, communication buckets, and temporary copies of weights and gradients."],
  generation: ["Generation", "vLLM on the same GPU, or the cached keys and values of transformers' own generation."],
  overhead: ["Overhead", "CUDA's context, NCCL, and what torch's allocator reserves beyond what is allocated."],
}
const ACCELERATE = /^toolkit train --preset (\S+) --num-processes (\d+) (?:--(script|module) (\S+) )?-- (.*)$/s
// Options that have a field of another name.
const FIELD_OF = { num_processes: "gpus", gpus_per_node: "nodes", price: "price_per_gpu_hour", load_in_4bit: "weights" }
const SERVED = "served" in document.body.dataset

const form = document.getElementById("form")
const byId = (id) => document.getElementById(id)
const models = new Set([...byId("models").options].map((option) => option.value))
const hubAnswers = new Map() // hub id -> its configuration, or why the hub refuses it
const state = { config: null, version: 0, plan: null, recommended: null }

// -- elements

function element(tag, properties = {}, ...children) {
  const { dataset, style, aria, ...plain } = properties
  const made = Object.assign(document.createElement(tag), plain)
  Object.assign(made.dataset, dataset)
  for (const [name, value] of Object.entries(style ?? {})) made.style.setProperty(name, value)
  for (const [name, value] of Object.entries(aria ?? {})) made.setAttribute(`aria-${name}`, value)
  made.append(...children.filter((child) => child !== null))
  return made
}

// A text in which `this` is code.
const inline = (text) => text.split("`").map((part, index) => (index % 2 ? element("code", { textContent: part }) : part))

// A message with the page's labels for the flags of a command line that it has a field for.
function labelled(text) {
  return text.replace(/`?--([a-z0-9-]+)(?: ([^`\s]+)(?=`))?`?/g, (whole, flag, value) => {
    const option = flag.replace(/^no-/, "").replaceAll("-", "_")
    const label = document.querySelector(`label[for="${FIELD_OF[option] ?? option}"]`)
    const chosen = value ?? (flag.startsWith("no-") ? "off" : { load_in_4bit: "QLoRA", activation_checkpointing: "on" }[option])
    return label === null ? whole : `“${label.textContent}”${chosen ? ` ${chosen}` : ""}`
  })
}

const gib = (bytes) => `${(bytes / GIB).toFixed(1)} GiB`
// A plan's peak, and what is possible beyond it, where the plan says so: the verdict depends on both.
const beyond = (plan) => Math.max((plan.possible_peak_bytes ?? 0) - plan.planned_peak_bytes, 0)
const peakOf = (plan) => gib(plan.planned_peak_bytes) + (beyond(plan) ? ` planned, up to ${gib(plan.possible_peak_bytes)} possible,` : "")
const lacksHost = (plan) => plan.verdict === "does_not_fit" && plan.headroom_bytes >= 0 && plan.host_bytes > (plan.host_memory_bytes ?? Infinity)
const settingsOf = (plan) => `batch ${plan.per_device_train_batch_size}${plan.activation_checkpointing ? ", ckpt" : ""}`
const digits = (value) => (value >= 100 ? 0 : value >= 10 ? 1 : 2)
const plain = (value) => value.toLocaleString("en", { minimumFractionDigits: digits(value), maximumFractionDigits: digits(value) })
const short = (value) => (value >= 9.995e5 ? `${plain(value / 1e6)}M` : value >= 999.5 ? `${plain(value / 1000)}k` : plain(value))
const hours = (value, unit) => (unit === "h" ? plain(value) : plain(60 * value))
const ranged = (show, range) => `${show(range[0])} to ${show(range[1])}`

// -- the form and the address

const named = () => [...form.elements].filter((field) => field.name && field.name !== "model")

function fields() {
  const found = {}
  for (const field of named()) if (field.value.trim() !== "") found[field.name] = field.value
  const weights = byId("weights").value
  if (weights === "full") delete found.lora_r
  if (weights === "qlora") found.load_in_4bit = "on"
  for (const name of ["method", "optim", "loss", "max_seq_length", "num_train_epochs"])
    if (found[name] === byId(name).dataset.default) delete found[name]
  for (const name of ["dataset_tokens", "num_train_epochs"]) if (byId(`field-${name}`).hidden) delete found[name]
  return found
}

function writeAddress() {
  const words = new URLSearchParams()
  for (const field of [byId("model"), byId("weights"), ...named()])
    if (field.value !== field.dataset.default) words.set(field.id, field.value)
  if (state.config !== null) words.set("config", state.config)
  history.replaceState(null, "", `${location.pathname}${location.search}${String(words) && `#${words}`}`)
}

function readAddress() {
  const words = new URLSearchParams(location.hash.slice(1))
  for (const field of [byId("model"), byId("weights"), ...named()]) field.value = words.get(field.id) ?? field.dataset.default ?? ""
  state.config = words.get("config")
}

function showError(error) {
  for (const message of document.querySelectorAll(".error")) message.hidden = true
  for (const field of form.querySelectorAll("[aria-invalid]")) field.removeAttribute("aria-invalid")
  if (error === null) return
  const name = byId(`error-${error.field}`) ? error.field : error.field === "load_in_4bit" ? "lora_r" : "model"
  const message = byId(`error-${name}`)
  message.replaceChildren(element("b", {}, ...inline(labelled(error.message))), ...inline(labelled(error.hint ?? "")))
  if (byId("answer").hidden) cannotCompute([error.message, error.hint].filter(Boolean).map(labelled).join("; "))
  glance("does_not_fit", "See the form", labelled(error.message).replaceAll("`", ""), `#field-${name}`)
  message.hidden = false
  byId(name).setAttribute("aria-invalid", "true")
  byId("said").textContent = `${error.message}. ${error.hint ?? ""}`
  if (error.paste) {
    const paste = element("button", { type: "button", textContent: "Paste its config.json instead", onclick: openPaste })
    message.append(element("span", { className: "actions" }, paste))
  }
}

// The answer in one line, which a phone shows above the form.
function glance(verdict, badge, text, target = "#results") {
  const line = byId("glance")
  line.hidden = false
  line.className = `glance ${verdict}`
  line.href = target
  line.firstElementChild.textContent = badge
  line.lastElementChild.textContent = text
}

function openPaste() {
  byId("paste").open = true
  byId("config").focus()
}

function useConfig(text) {
  state.config = text
  byId("model").value = "config.json"
  update()
}

// -- the hub: the one request that a static page makes to anywhere else

async function hubConfig(model) {
  if (SERVED) return {} // the server asks, with the token and the cache of its user
  if (!hubAnswers.has(model)) {
    const known = models.has(model) || [...models].some((id) => id.split("/")[1] === model)
    if (known || !/^[\w.-]+(\/[\w.-]+)?$/.test(model) || model.endsWith(".json")) return {}
    try {
      const response = await fetch(`https://huggingface.co/${model}/resolve/main/config.json`, { credentials: "omit" })
      const refused = response.headers.get("X-Error-Code") ?? ""
      hubAnswers.set(model, response.ok ? { config: await response.text() } : { refused, status: response.status })
    } catch {
      return { refused: "Unreachable" } // asked again next time
    }
  }
  return hubAnswers.get(model)
}

// -- who answers: the server, or a worker

let worker = null
const waiting = new Map()

function startWorker() {
  if (location.protocol === "file:") {
    const folder = decodeURIComponent(location.pathname).replace(/\/[^/]*$/, "")
    const path = /^[\w./-]+$/.test(folder) ? folder : `'${folder.replaceAll("'", "'\\''")}'`
    return cannotCompute(
      "A page that is opened from a disk cannot compute. Type `toolkit page`, which opens the planner; or type " +
        `\`python3 -m http.server -d ${path}\` and open http://localhost:8000. The table below needs neither.`,
    )
  }
  try {
    worker = new Worker(`worker.js?sizes=${encodeURIComponent(document.body.dataset.sizes)}`, { type: "module" })
  } catch {
    return cannotCompute("This browser cannot start the page's Python; the table below needs none.")
  }
  worker.onerror = () => cannotCompute("This browser cannot start the page's Python; the table below needs none.")
  worker.onmessage = ({ data }) => {
    if (data.id !== undefined) {
      waiting.get(data.id)(data.answer)
      waiting.delete(data.id)
    } else if (data.loaded !== undefined) {
      byId("progress").value = data.loaded
      if (data.loaded === 1) byId("status-text").textContent = "Starting Python …"
    } else if (data.failed) {
      cannotCompute(`The page's Python did not start: ${data.failed}`)
    }
  }
}

function cannotCompute(text) {
  byId("status").hidden = false
  byId("progress").hidden = true
  byId("status-text").replaceChildren(...inline(text))
  byId("answers").setAttribute("aria-busy", "false")
}

let asked = 0
function ask(message) {
  if (SERVED) return askServer(message)
  return new Promise((resolve) => {
    asked += 1
    waiting.set(asked, resolve)
    worker.postMessage({ id: asked, ...message })
  })
}

async function askServer(message) {
  try {
    const headers = { "Content-Type": "application/json" }
    const response = await fetch("ask", { method: "POST", headers, body: JSON.stringify(message) })
    if (response.ok) return await response.json()
    return { error: { message: `the server answers ${response.status}`, hint: "its terminal says why", field: "model" } }
  } catch {
    return { error: { message: "`toolkit page` has ended", hint: "start it again", field: "model" } }
  }
}

// The table takes the server a few seconds when it is first shown.
function loadTable() {
  new IntersectionObserver(async ([entry], observer) => {
    if (!entry.isIntersecting) return
    observer.disconnect()
    byId("known").replaceChildren(element("p", { className: "hint", textContent: "Planning them: a few seconds, once …" }))
    const response = await fetch("known")
    byId("known").innerHTML = response.ok ? await response.text() : "The table could not be made: the terminal says why."
  }).observe(byId("known-heading"))
}

// -- a change: the plan first, then the recommendation; the answer to an older form is dropped

let running = false
async function update() {
  writeAddress()
  byId("field-lora_r").hidden = byId("weights").value === "full"
  const generates = document.body.dataset.generating.split(" ").includes(byId("method").value)
  for (const name of ["dataset_tokens", "num_train_epochs"]) byId(`field-${name}`).hidden = generates
  state.version += 1
  if (running || (worker === null && !SERVED)) return
  running = true
  let done = 0
  while (done !== state.version) {
    done = state.version
    await compute(done)
  }
  running = false
  byId("answers").setAttribute("aria-busy", "false")
}

async function compute(version) {
  const started = performance.now()
  byId("answer").classList.add("stale")
  const model = byId("model").value.trim()
  const config = state.config !== null ? { config: state.config } : await hubConfig(model)
  const request = { model, fields: fields(), ...config }
  const planned = await ask({ request: { ...request, command: "plan" } })
  if (version !== state.version) return
  byId("status").hidden = true
  showError(planned.error ? { ...planned.error, paste: planned.error.field === "model" } : null)
  if (planned.error) return
  state.plan = { ...planned, json: JSON.parse(planned.text) }
  state.recommended = null
  showPlan()
  performance.measure("plan", { start: started })
  const recommended = await ask({ request: { ...request, command: "recommend" } })
  if (version !== state.version) return
  state.recommended = { ...recommended, json: recommended.error ? null : JSON.parse(recommended.text) }
  showRecommended()
  showCommands()
  byId("answer").classList.remove("stale")
  performance.measure("change", { start: started })
}

// -- the answer

function bestPlan({ plans, summary }) {
  const [, size, name] = summary.match(/(\d+) x .*?`([^`]+)`/) ?? []
  return plans.find((plan) => plan.preset === name && String(plan.world_size) === size) ?? plans[0]
}

function partsOf(plan) {
  const peak = plan.phases[plan.peak_phase]
  const sizes = Object.keys(PARTS).map((part) => [part, part === "overhead" ? plan.overhead_bytes : (peak[`${part}_bytes`] ?? 0)])
  return sizes.filter(([, size]) => size > 0)
}

function figuresOf(plan) {
  const found = []
  const speed = plan.tokens_per_second_per_gpu
  const all = (value) => short(value * plan.world_size)
  const add = (name, value, more) => found.push([name, value, more])
  add("Tokens per second", speed ? all(plan.tokens_per_second_per_gpu_estimate) : "n/a", speed ? `${ranged(all, speed)}, all GPUs` : "no speed is known for this")
  const finish = plan.finish
  if (finish?.hours_range) {
    const unit = finish.hours >= 2 ? "h" : "min"
    const show = (value) => hours(value, unit)
    add("Time to train", `${show(finish.hours)} ${unit}`, `${ranged(show, finish.hours_range)} ${unit}, ${finish.steps.toLocaleString("en")} steps`)
    const gpuHours = (value) => plain(value * plan.world_size)
    if (finish.dollars_range) add("Cost", `$${plain(finish.dollars)}`, `$${plain(finish.dollars_range[0])} to $${plain(finish.dollars_range[1])}`)
    else add("GPU-hours", gpuHours(finish.hours), `${ranged(gpuHours, finish.hours_range)}; with a price, the cost`)
  }
  add("Host memory", gib(plan.host_bytes), plan.disk_bytes ? `per node, and ${gib(plan.disk_bytes)} on its disk` : "per node")
  add("Largest per-GPU batch", plan.largest_micro_batch ?? "none", "sequences per accumulation step")
  add("Fewest GPUs", plan.smallest_world_size ?? "none", "a power of two, with this batch")
  return found
}

const evidenceAnchor = (method) => (method === "sft" ? "#published-peaks" : "#training-methods")

function evidence(plan) {
  const base = document.body.dataset.evidence
  const what = `how far plans of ${state.plan.json.model_type}, ${plan.method} were from measured and traced peaks`
  const text = `Evidence: ${what}`
  return base ? element("a", { href: base + evidenceAnchor(plan.method), textContent: text }) : element("span", { className: "hint", textContent: `${text}: docs/evidence/plan-accuracy.md` })
}

function showPlan() {
  const answer = state.plan.json
  const best = bestPlan(answer)
  byId("answer").hidden = false
  byId("verdict").className = `card ${best.verdict}`
  byId("badge").textContent = VERDICTS[best.verdict]
  const host = lacksHost(best) ? `. It needs ${gib(best.host_bytes)} of host memory per node, which has ${gib(best.host_memory_bytes)}` : ""
  byId("summary").replaceChildren(...inline(answer.summary + host))
  const memory = gib(best.planned_peak_bytes + best.headroom_bytes)
  glance(best.verdict, VERDICTS[best.verdict], `${best.preset}, ${settingsOf(best)}: ${(best.planned_peak_bytes / GIB).toFixed(1)} of ${memory}`)
  byId("said").textContent = `${VERDICTS[best.verdict]}: ${answer.summary.replaceAll("`", "")}`
  byId("figures").replaceChildren(
    ...figuresOf(best).map(([name, value, more]) =>
      element("div", {}, element("dt", { textContent: name }), element("dd", {}, String(value), element("small", { textContent: more }))),
    ),
  )
  showBars(answer.plans, best)
  showTable(answer.plans)
}

function showBars(plans, best) {
  const memory = best.planned_peak_bytes + best.headroom_bytes
  const order = ["fits", "too_close", "does_not_fit"]
  const key = (plan) => [order.indexOf(plan.verdict), plan.verdict === "fits" ? -(plan.tokens_per_second_per_gpu_estimate ?? 0) : plan.planned_peak_bytes]
  const sorted = [...plans].sort((a, b) => key(a)[0] - key(b)[0] || key(a)[1] - key(b)[1])
  const scale = Math.min(Math.max(memory, ...plans.map((plan) => plan.planned_peak_bytes)), 1.6 * memory)
  const limit = `${(100 * memory) / scale}%`
  byId("memory-note").textContent = `The line is the GPU's ${gib(memory)}. Of presets that fit, the fastest come first, each with its own per-GPU batch; ckpt: activation checkpointing. ${plans.some(beyond) ? "Hatched: possible beyond the plan. " : ""}Open one for its parts.`
  const used = new Set(plans.flatMap((plan) => partsOf(plan).map(([part]) => part)))
  byId("legend").replaceChildren(
    ...[...used].sort((a, b) => Object.keys(PARTS).indexOf(a) - Object.keys(PARTS).indexOf(b)).map((part) => {
      const button = element("button", { type: "button", dataset: { part } }, element("i", { style: { "--part": `var(--${part})` } }), PARTS[part][0])
      return element("li", {}, button)
    }),
  )
  const open = new Set([...document.querySelectorAll(".bar[open]")].map((bar) => bar.dataset.preset))
  byId("bars").style.setProperty("--limit", limit)
  byId("bars").replaceChildren(
    ...sorted.map((plan) => {
      const parts = partsOf(plan)
      const segments = parts.map(([part, size]) =>
        element("i", { dataset: { part, size: gib(size) }, style: { "--part": `var(--${part})`, width: `${(100 * size) / scale}%` } }),
      )
      const more = plan.verdict === "does_not_fit" ? 0 : beyond(plan)
      if (more) segments.push(element("i", { className: "beyond", style: { width: `${(100 * more) / scale}%` } }))
      const track = element("span", { className: "track", role: "img", aria: { label: parts.map(([part, size]) => `${PARTS[part][0]} ${gib(size)}`).join(", ") } }, ...segments, element("u"))
      const row = element(
        "summary",
        {},
        element("span", { className: "name" }, plan.preset, " ", element("small", { textContent: settingsOf(plan) })),
        track,
        element("span", { className: "total", textContent: gib(plan.planned_peak_bytes) }),
        element("span", { className: "word", textContent: lacksHost(plan) ? "host too small" : VERDICT_WORDS[plan.verdict] }),
      )
      const bar = element("details", { className: `bar ${plan.verdict} ${plan === best ? "best" : ""}`, dataset: { preset: plan.preset } }, row)
      const fill = () => bar.open && bar.childElementCount === 1 && bar.append(details(plan))
      bar.ontoggle = fill
      if (open.has(plan.preset)) (bar.open = true), fill()
      return bar
    }),
  )
}

function details(plan) {
  const rows = partsOf(plan).map(([part, size]) =>
    element("tr", {}, element("th", { scope: "row" }, element("i", { className: "dot", style: { "--part": `var(--${part})` } }), PARTS[part][0]), element("td", { className: "num", textContent: gib(size) }), element("td", { textContent: PARTS[part][1] })),
  )
  const steps = plan.gradient_accumulation_steps ?? 1
  const settings = `per-GPU batch ${plan.per_device_train_batch_size}, ${steps} accumulation ${steps === 1 ? "step" : "steps"}, activation checkpointing ${plan.activation_checkpointing ? "on" : "off"}`
  const figures = figuresOf(plan).map(([name, value, more]) => element("div", {}, element("dt", { textContent: name }), element("dd", {}, String(value), element("small", { textContent: more }))))
  return element(
    "div",
    { className: "more" },
    element("p", { className: "hint", textContent: `${peakOf(plan)} at its peak, in the ${plan.peak_phase}, with ${settings}:` }),
    element("div", { className: "scroll" }, element("table", {}, element("tbody", {}, ...rows))),
    element("dl", {}, ...figures),
    plan.advice.length ? element("ul", {}, ...plan.advice.map((text) => element("li", {}, ...inline(text)))) : null,
    element("p", {}, evidence(plan)),
  )
}

function showTable(plans) {
  const parts = Object.keys(PARTS).filter((part) => plans.some((plan) => partsOf(plan).some(([name]) => name === part)))
  const number = (text) => element("td", { className: "num", textContent: text })
  const heads = ["Preset", "Verdict", "Peak", ...parts.map((part) => PARTS[part][0]), "Host, per node", "Per-GPU batch", "Largest", "Fewest GPUs", "Tokens/s per GPU", "Hours", "Dollars"]
  const head = element("tr", {}, ...heads.map((textContent, index) => element("th", { scope: "col", textContent, className: index > 1 ? "num" : "" })))
  const rows = plans.map((plan) => {
    const sizes = Object.fromEntries(partsOf(plan))
    const { finish } = plan
    return element(
      "tr",
      {},
      element("th", { scope: "row", textContent: plan.preset }),
      element("td", { textContent: VERDICT_WORDS[plan.verdict] }),
      ...[plan.planned_peak_bytes, ...parts.map((part) => sizes[part] ?? 0), plan.host_bytes].map((size) => number((size / GIB).toFixed(1))),
      number(settingsOf(plan).replace("batch ", "")),
      number(plan.largest_micro_batch ?? "none"),
      number(plan.smallest_world_size ?? "none"),
      number(plan.tokens_per_second_per_gpu ? ranged(short, plan.tokens_per_second_per_gpu) : "n/a"),
      number(finish?.hours_range ? ranged(plain, finish.hours_range) : "n/a"),
      number(finish?.dollars_range ? ranged(plain, finish.dollars_range) : "n/a"),
    )
  })
  const caption = element("caption", { className: "hidden", textContent: "Plans, sizes in GiB" })
  byId("plans").replaceChildren(caption, element("thead", {}, head), element("tbody", {}, ...rows))
}

function showRecommended() {
  const { json, error } = state.recommended
  if (error) {
    byId("recommended").replaceChildren(element("h2", { textContent: "No preset to recommend" }), element("p", {}, ...inline(labelled(error.message))), element("p", { className: "hint" }, ...inline(labelled(error.hint ?? ""))))
    return
  }
  const { choice, reasons, others } = json
  if (choice === undefined) { // no preset fits: the layout of a pipeline on paper
    byId("recommended").replaceChildren(element("h2", { textContent: "No preset fits" }), element("pre", { textContent: JSON.stringify(json, null, 1) }))
    return
  }
  const steps = choice.gradient_accumulation_steps
  const settings = [`per-GPU batch ${choice.per_device_train_batch_size}`, `${steps} accumulation ${steps === 1 ? "step" : "steps"}`, `${choice.global_batch_size} sequences per step`, `activation checkpointing ${choice.activation_checkpointing ? "on" : "off"}`]
  const files = element("button", { type: "button", textContent: `Download the files of ${choice.preset}`, onclick: () => download(choice.preset) })
  const next = others.map((other) => element("li", {}, element("b", { textContent: other.preset }), ": ", ...inline(other.why_not)))
  byId("recommended").replaceChildren(
    element("h2", { textContent: `Recommended: ${choice.preset}` }),
    element("p", { className: "choice", textContent: settings.join(" · ") }),
    element("ul", {}, ...reasons.map((reason) => element("li", {}, ...inline(reason)))),
    next.length ? element("details", {}, element("summary", { textContent: "The next best" }), element("ul", {}, ...next)) : null,
    element("div", { className: "actions" }, files),
  )
}

function showCommands() {
  const { json } = state.recommended
  const train = json?.command
  const [, preset, count, kind, script, words] = train?.match(ACCELERATE) ?? []
  const launch = preset && `accelerate launch --config_file accelerate_configs/${preset}.yaml --num_processes ${count} ${script ? `${kind === "module" ? "-m " : ""}${script}` : "-m toolkit.train"} ${words}`
  const commands = [
    ["Plan", state.plan.words],
    ["Recommend", state.recommended.words],
    [preset ? "Train" : "Train, on each node", train],
    ["Train, with accelerate and the preset's files", launch],
    ["Compare the best on your GPUs", json?.compare_command],
  ]
  byId("commands").replaceChildren(
    ...commands.filter(([, text]) => text).map(([title, text]) => {
      const copy = element("button", { type: "button", textContent: "Copy", aria: { label: `Copy the command: ${title}` }, onclick: () => copied(copy, text) })
      return element("div", { className: "command" }, element("h3", { textContent: title }), element("pre", {}, ...lineOf(text)), copy)
    }),
  )
}

// A command in pieces that are not broken where they fit into a line: an option with its value, and of these each word.
const pieces = (text, separator, inside) => text.split(separator).flatMap((part) => [element("span", {}, ...inside(part)), " "])
const lineOf = (text) => pieces(text, / (?=--)/, (option) => pieces(option, " ", (word) => [word]).slice(0, -1)).slice(0, -1)

async function copied(button, text) {
  await navigator.clipboard.writeText(text)
  const before = button.textContent
  button.textContent = "Copied"
  setTimeout(() => (button.textContent = before), 1500)
}

async function download(preset) {
  const { files } = await ask({ preset })
  const bytes = Uint8Array.from(atob(files), (letter) => letter.charCodeAt(0))
  const link = element("a", { href: URL.createObjectURL(new Blob([bytes], { type: "application/zip" })), download: `${preset}.zip` })
  link.click()
}

// -- parts are explained where they are pointed at, or have the focus

function explain(event) {
  const target = event.target.closest?.("[data-part]")
  const tip = byId("tip")
  tip.hidden = !target
  if (!target) return
  const [name, text] = PARTS[target.dataset.part]
  tip.replaceChildren(element("b", { textContent: target.dataset.size ? `${name}: ${target.dataset.size}` : name }), text)
  const box = target.getBoundingClientRect()
  const left = Math.min(Math.max(box.left, 8), document.documentElement.clientWidth - tip.offsetWidth - 8)
  tip.style.left = `${left + scrollX}px`
  tip.style.top = `${box.bottom + scrollY + 6}px`
}

for (const kind of ["pointerover", "focusin"]) document.addEventListener(kind, explain)
document.addEventListener("keydown", (event) => event.key === "Escape" && (byId("tip").hidden = true))

let timer
form.addEventListener("input", ({ target }) => {
  if (target.id === "config" || target.id === "file") return
  if (target.id === "model") state.config = null
  byId("answers").setAttribute("aria-busy", "true")
  clearTimeout(timer)
  timer = setTimeout(update, target.tagName === "SELECT" ? 0 : target.id === "model" && !models.has(target.value) ? 600 : 120)
})
form.addEventListener("submit", (event) => event.preventDefault())
form.addEventListener("reset", (event) => {
  event.preventDefault()
  history.replaceState(null, "", location.pathname + location.search)
  readAddress()
  update()
})
byId("use-config").onclick = () => useConfig(byId("config").value)
byId("file").onchange = async ({ target }) => target.files[0] && useConfig(await target.files[0].text())
byId("copy-link").onclick = ({ target }) => copied(target, location.href)
for (const kind of ["dragover", "dragleave", "drop"])
  byId("paste").addEventListener(kind, async (event) => {
    event.preventDefault()
    byId("config").classList.toggle("over", kind === "dragover")
    const file = event.dataTransfer.files[0]
    if (kind === "drop" && file) useConfig(await file.text())
  })
addEventListener("hashchange", () => {
  readAddress()
  update()
  scrollTo({ top: 0 })
})

readAddress()
if (SERVED) loadTable()
else startWorker()
update()
