"use strict";
// Speech is fetched as raw samples and played as it comes: an <audio> element would wait for the end of a WAV.

const element = (id) => document.getElementById(id);
const LEAD_SECONDS = 0.05;
let running = null; // { abort, context } of the speech that is being fetched or played

function showStatus(text, failed = false) {
  element("status").textContent = text;
  element("status").classList.toggle("failed", failed);
}

function headers() {
  const key = element("key").value;
  return key ? { Authorization: `Bearer ${key}` } : {};
}

async function errorText(response) {
  try {
    return (await response.json()).error.message;
  } catch {
    return `the server answered with status ${response.status}`;
  }
}

function fill(select, names) {
  const chosen = select.value;
  select.replaceChildren(...names.map((name) => new Option(name, name)));
  if (names.includes(chosen)) select.value = chosen;
}

async function loadChoices() {
  const [models, voices] = await Promise.all(["/v1/models", "/v1/audio/voices"].map((path) => fetch(path, { headers: headers() })));
  if (models.status === 401) {
    element("key-choice").hidden = false;
    showStatus("This server needs an API key.");
    return;
  }
  if (!models.ok || !voices.ok) throw new Error(await errorText(models.ok ? voices : models));
  fill(element("model"), (await models.json()).data.map((model) => model.id));
  fill(element("voice"), (await voices.json()).voices.map((voice) => voice.name));
}

function wavFile(pieces, rate) {
  const size = pieces.reduce((sum, piece) => sum + piece.byteLength, 0);
  const view = new DataView(new ArrayBuffer(44));
  const text = (place, letters) => [...letters].forEach((letter, n) => view.setUint8(place + n, letter.charCodeAt(0)));
  text(0, "RIFF"); view.setUint32(4, 36 + size, true); text(8, "WAVEfmt "); view.setUint32(16, 16, true);
  view.setUint16(20, 1, true); view.setUint16(22, 1, true); view.setUint32(24, rate, true);
  view.setUint32(28, 2 * rate, true); view.setUint16(32, 2, true); view.setUint16(34, 16, true);
  text(36, "data"); view.setUint32(40, size, true);
  return new Blob([view, ...pieces], { type: "audio/wav" });
}

// Schedules pieces one behind another, without a gap.
class Playback {
  constructor(context, rate) {
    this.context = context;
    this.rate = rate;
    this.next = 0;
    this.underruns = 0;
    this.left = 0;
  }

  play(bytes) {
    const words = new DataView(bytes.buffer, bytes.byteOffset, bytes.byteLength);
    const buffer = this.context.createBuffer(1, bytes.byteLength / 2, this.rate);
    const samples = buffer.getChannelData(0);
    for (let n = 0; n < samples.length; n++) samples[n] = words.getInt16(2 * n, true) / 32767;
    const source = this.context.createBufferSource();
    source.buffer = buffer;
    source.connect(this.context.destination);
    const now = this.context.currentTime;
    if (this.next && this.next < now) this.underruns += 1;
    const start = Math.max(this.next, now + LEAD_SECONDS);
    source.start(start);
    this.next = start + buffer.duration;
  }

  ended() {
    return new Promise((resolve) => setTimeout(resolve, Math.max(0, 1000 * (this.next - this.context.currentTime))));
  }
}

async function speak(context, abort) {
  const began = performance.now();
  const response = await fetch("/v1/audio/speech", {
    method: "POST",
    headers: { "Content-Type": "application/json", ...headers() },
    body: JSON.stringify({
      model: element("model").value,
      voice: element("voice").value,
      input: element("text").value,
      seed: Number(element("seed").value),
      speed: Number(element("speed").value),
      response_format: "pcm",
    }),
    signal: abort.signal,
  });
  if (!response.ok) throw new Error(await errorText(response));
  const rate = Number(response.headers.get("x-sample-rate"));
  const playback = new Playback(context, rate);
  const pieces = [];
  let rest = new Uint8Array(0);
  const reader = response.body.getReader();
  for (;;) {
    const { done, value } = await reader.read();
    if (done) break;
    const bytes = new Uint8Array(rest.length + value.length); // a sample may be cut in two
    bytes.set(rest);
    bytes.set(value, rest.length);
    const whole = bytes.length - (bytes.length % 2);
    rest = bytes.slice(whole);
    if (!whole) continue;
    if (!pieces.length) {
      document.body.dataset.firstAudio = Math.round(performance.now() - began);
      showStatus("Speaking.");
    }
    pieces.push(bytes.slice(0, whole));
    playback.play(pieces.at(-1));
  }
  const seconds = pieces.reduce((sum, piece) => sum + piece.length, 0) / 2 / rate;
  offer(wavFile(pieces, rate));
  await playback.ended();
  if (!abort.signal.aborted) {
    showStatus(`Spoken: ${seconds.toFixed(1)} seconds, first sound after ${document.body.dataset.firstAudio} milliseconds.`);
  }
}

function offer(file) {
  const player = element("player");
  if (player.src) URL.revokeObjectURL(player.src);
  player.src = element("download").href = URL.createObjectURL(file);
  element("download").dataset.bytes = file.size;
  element("result").hidden = false;
}

function stop() {
  if (!running) return;
  running.abort.abort();
  running.context.close();
  running = null;
  showButtons();
}

function showButtons() {
  element("stop").disabled = !running;
}

async function start() {
  stop();
  const context = new AudioContext(); // in the click: a browser keeps one that is made later silent
  const abort = new AbortController();
  const own = (running = { context, abort });
  showButtons();
  showStatus("Waiting for the first sound.");
  try {
    await speak(context, abort);
  } catch (error) {
    if (abort.signal.aborted) showStatus("Stopped.");
    else showStatus(error.message, true);
  } finally {
    if (running === own) {
      context.close();
      running = null;
      showButtons();
    }
  }
}

element("form").addEventListener("submit", (event) => {
  event.preventDefault();
  start();
});
element("stop").addEventListener("click", () => {
  stop();
  element("speak").focus();
});
document.addEventListener("keydown", (event) => {
  if (event.key === "Escape") stop();
  if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) element("form").requestSubmit();
});
element("key").addEventListener("change", () => loadChoices().catch((error) => showStatus(error.message, true)));
loadChoices().catch((error) => showStatus(error.message, true));
