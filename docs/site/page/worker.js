// Runs the toolkit's own Python beside the page, so that the page never waits for it.
// Every file but the loader is compressed in the folder itself: no server has to.
import { loadPyodide } from "./pyodide.mjs"

const FILES = ["pyodide.asm.wasm.gz", "pyodide.asm.mjs.gz", "library.zip.gz", "packages.gz"]
const sizes = JSON.parse(new URL(location.href).searchParams.get("sizes"))
const total = FILES.reduce((sum, name) => sum + sizes[name], 0)
let received = 0

// The decompressed bytes of a file, counted while they arrive.
async function unpacked(name) {
  const response = await fetch(name)
  if (!response.ok) throw new Error(`${name}: the server answers ${response.status}`)
  const counted = new TransformStream({
    transform(chunk, out) {
      received += chunk.byteLength
      postMessage({ loaded: Math.min(received / total, 1) })
      out.enqueue(chunk)
    },
  })
  // A server that names .gz an encoding has it decompressed by the browser already.
  const encoded = response.headers.get("Content-Encoding") === "gzip"
  const body = encoded ? response.body : response.body.pipeThrough(counted).pipeThrough(new DecompressionStream("gzip"))
  return new Response(body, { headers: { "Content-Type": "application/wasm" } })
}

async function bytes(name) {
  return new Uint8Array(await (await unpacked(name)).arrayBuffer())
}

// The packages: a line of JSON with names and sizes, then the files one after another.
function writeFiles(FS, folder, packed) {
  const end = packed.indexOf(10)
  const made = new Set()
  let start = end + 1
  for (const [name, size] of JSON.parse(new TextDecoder().decode(packed.subarray(0, end)))) {
    const path = `${folder}/${name}`
    const parent = path.slice(0, path.lastIndexOf("/"))
    if (!made.has(parent)) FS.mkdirTree(parent)
    made.add(parent)
    FS.writeFile(path, packed.subarray(start, start + size))
    start += size
  }
}

const wasm = unpacked(FILES[0])
const [core, library, packages] = FILES.slice(1).map(bytes)
const fetchElse = self.fetch
self.fetch = (resource, options) =>
  String(resource).endsWith("pyodide.asm.wasm") ? wasm : fetchElse(resource, options)

async function start() {
  const blob = new Blob([await core], { type: "text/javascript" })
  const { default: createPyodideModule } = await import(URL.createObjectURL(blob))
  const stdLibURL = URL.createObjectURL(new Blob([await library]))
  const files = await packages
  const python = await loadPyodide({
    indexURL: new URL(".", location.href).href,
    createPyodideModule,
    stdLibURL,
    fsInit: async (FS, { sitePackages }) => writeFiles(FS, sitePackages, files),
  })
  return python.pyimport("answer")
}

const answers = start()
answers.then(
  () => postMessage({ ready: true }),
  (error) => postMessage({ failed: String(error.message ?? error) }),
)

onmessage = async ({ data: { id, ...message } }) => {
  const python = await answers
  try {
    postMessage({ id, answer: JSON.parse(python.reply(JSON.stringify(message))) })
  } catch (error) {
    postMessage({ id, answer: { error: { message: String(error.message ?? error), hint: null, field: "model" } } })
  }
}
