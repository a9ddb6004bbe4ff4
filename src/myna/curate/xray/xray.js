// What was measured is in the page; nothing is asked of any server.
const data = JSON.parse(document.getElementById('data').textContent);
const sound = document.getElementById('sound'), player = document.getElementById('player'), playing = document.getElementById('playing');
let stopAt = Infinity, pressed = null;

function play(source, start, end, name, button) {
  player.hidden = false;
  playing.textContent = name;
  if (pressed) pressed.classList.remove('playing');
  pressed = button;
  if (button) button.classList.add('playing');
  stopAt = end;
  const begin = () => { sound.currentTime = start; sound.play().catch(() => {}); };
  if (sound.getAttribute('src') !== source) {
    sound.src = source;
    if (start) sound.addEventListener('loadedmetadata', begin, { once: true });
    sound.load();
    if (start) { sound.play().catch(() => {}); return; }
  }
  begin();
}
sound.addEventListener('timeupdate', () => { if (sound.currentTime >= stopAt) sound.pause(); });
sound.addEventListener('error', () => { playing.textContent += ': this file is not there. Keep the page in its folder.'; });
document.addEventListener('click', event => {
  const button = event.target.closest('.play');
  if (button) play(button.dataset.src, 0, Infinity, button.getAttribute('aria-label').replace(/^Play /, ''), button);
});

// Hours by reason: a piece of the bar shows its row and plays an example.
for (const piece of document.querySelectorAll('.bar button')) piece.addEventListener('click', () => {
  const row = document.getElementById(piece.dataset.row);
  for (const other of document.querySelectorAll('tr.shown')) other.classList.remove('shown');
  row.classList.add('shown');
  row.scrollIntoView({ block: 'nearest' });
  row.querySelector('.play')?.click();
});

// Thresholds: hours on either side of an edge of a bin are exact.
const hours = ms => ms < 7.2e6 ? `${(ms / 6e4).toFixed(1)} min` : `${(ms / 3.6e6).toFixed(2)} h`;
const changed = new Map();
for (const card of document.querySelectorAll('.measure')) {
  const measure = data.measures[card.dataset.measure], sliders = [...card.querySelectorAll('input')];
  const svg = card.querySelector('svg'), step = Number(svg.dataset.step), cost = card.querySelector('.cost'), first = cost.textContent;
  const update = () => {
    const at = sliders.map(slider => Number(slider.value));
    if (at.length > 1 && at[0] > at[1]) { sliders[1].value = at[1] = at[0]; }
    const low = measure.side === 'max' ? 0 : at[0] + 1, high = measure.side === 'min' ? measure.pass_ms.length : (at[1] ?? at[0]) + 1;
    const kept = measure.missing_kept_ms + measure.pass_ms.slice(low, high).reduce((sum, ms) => sum + ms, 0);
    const values = at.map(index => measure.edges[index]), difference = kept - measure.kept_ms;
    sliders.forEach((slider, index) => {
      slider.parentElement.querySelector('output').textContent = values[index];
      slider.setAttribute('aria-valuetext', values[index]);
      const line = svg.querySelector(`[data-limit="${index}"]`), x = step * (at[index] + 1);
      line.setAttribute('x1', x);
      line.setAttribute('x2', x);
    });
    const isChanged = values.some((value, index) => value !== measure.limits[index]);
    const total = measure.missing_kept_ms + measure.pass_ms.reduce((sum, ms) => sum + ms, 0);
    cost.textContent = isChanged
      ? `Keeps ${hours(kept)} of ${hours(total)}: ${difference < 0 ? '−' : '+'}${hours(Math.abs(difference))} against now.` : first;
    if (isChanged) changed.set(measure.setting, values.length > 1 ? `[${values.join(',')}]` : values[0]); else changed.delete(measure.setting);
    const settings = document.getElementById('settings');
    if (settings) settings.textContent = `myna curate --out ${data.folder}` + [...changed].map(([key, value]) => ` --set ${key}=${value}`).join('');
  };
  for (const slider of sliders) slider.addEventListener('input', update);
}

// Map of voices.
for (const dot of document.querySelectorAll('[data-clip] > title')) dot.parentElement.addEventListener('click', () => {
  const [file, start, end] = data.map[dot.parentElement.dataset.clip] || [];
  if (file) play(file, start, end, dot.textContent, null);
});

// Timelines: a strip of waveform over segments.
const colors = {};
for (const swatch of document.querySelectorAll('.swatch[data-reason]')) colors[swatch.dataset.reason] = getComputedStyle(swatch).backgroundColor;
const clock = ms => { const s = Math.floor(ms / 1000); return `${Math.floor(s / 3600)}:${String(Math.floor(s / 60) % 60).padStart(2, '0')}:${String(s % 60).padStart(2, '0')}`; };
for (const strip of document.querySelectorAll('.strip')) {
  const timeline = data.timelines[strip.dataset.timeline], canvas = strip.querySelector('canvas'), note = strip.parentElement.querySelector('.strip-note');
  const total = timeline.segments.at(-1)[1] || 1;
  let at = 0;
  const describe = () => {
    const [start, end, reason, speaker] = timeline.segments[at];
    const text = `${clock(start)} to ${clock(end)}, ${reason}${speaker ? ', ' + speaker : ''}`;
    strip.setAttribute('aria-valuenow', at + 1);
    strip.setAttribute('aria-valuetext', text);
    return text;
  };
  const draw = () => {
    const width = canvas.width = strip.clientWidth * devicePixelRatio, height = canvas.height = 92 * devicePixelRatio;
    const pen = canvas.getContext('2d'), style = getComputedStyle(document.documentElement), wave = height * 0.6;
    pen.clearRect(0, 0, width, height);
    pen.fillStyle = style.getPropertyValue('--quiet');
    timeline.peaks.forEach((peak, index) => {
      const tall = Math.max(1, wave * peak / 100);
      pen.fillRect(width * index / timeline.peaks.length, (wave - tall) / 2, Math.max(1, width / timeline.peaks.length - 1), tall);
    });
    const top = timeline.peaks.length ? wave + 4 : 0;
    for (const [start, end, reason] of timeline.segments) {
      pen.fillStyle = colors[reason] || style.getPropertyValue('--quiet');
      pen.fillRect(width * start / total, top, Math.max(1, width * (end - start) / total - 0.5), height - top);
    }
    const [start, end] = timeline.segments[at];
    pen.strokeStyle = style.getPropertyValue('--ink');
    pen.lineWidth = 2 * devicePixelRatio;
    pen.strokeRect(width * start / total, 1, Math.max(3, width * (end - start) / total), height - 2);
  };
  const start = () => {
    const [begin, end, , , file, place] = timeline.segments[at];
    if (file >= 0) play(timeline.files[file], place / 1000, (place + end - begin) / 1000, `${timeline.recording}, ${describe()}`, null);
    else note.textContent = `${describe()}: cannot be heard`;
  };
  const find = event => {
    const moment = total * (event.clientX - strip.getBoundingClientRect().left) / strip.clientWidth;
    return Math.max(0, timeline.segments.findIndex(segment => segment[1] > moment));
  };
  strip.addEventListener('click', event => { at = find(event); draw(); note.textContent = describe(); start(); });
  strip.addEventListener('mousemove', event => {
    const [begin, end, reason, speaker] = timeline.segments[find(event)];
    note.textContent = `${clock(begin)} to ${clock(end)}, ${reason}${speaker ? ', ' + speaker : ''}`;
  });
  strip.addEventListener('keydown', event => {
    const move = { ArrowRight: 1, ArrowUp: 1, ArrowLeft: -1, ArrowDown: -1, PageUp: 20, PageDown: -20, Home: -1e9, End: 1e9 }[event.key];
    if (move) at = Math.min(timeline.segments.length - 1, Math.max(0, at + move));
    if (event.key === 'Enter' || event.key === ' ') start();
    if (!move && event.key !== 'Enter' && event.key !== ' ') return;
    event.preventDefault();
    draw();
    note.textContent = describe();
  });
  describe();
  new ResizeObserver(draw).observe(strip);
  matchMedia('(prefers-color-scheme: dark)').addEventListener('change', draw);
}

// Corrections: what is written becomes a command to paste.
const corrections = new Map(), list = document.getElementById('commands');
const quote = text => /^[\w@%+=:,./-]+$/.test(text) ? text : `'${text.replaceAll("'", `'"'"'`)}'`;
let isCopied = true;
function correct(clip, kind, words) {
  if (words) corrections.set(`${clip} ${kind}`, `myna correct ${data.folder} ${quote(clip)} ${words}`); else corrections.delete(`${clip} ${kind}`);
  list.textContent = [...corrections.values()].join('\n') || 'Nothing yet.';
  isCopied = !corrections.size;
}
for (const card of document.querySelectorAll('.doubt')) {
  const area = card.querySelector('textarea'), before = area.value, clip = card.dataset.clip;
  const write = () => {
    const text = area.value.trim().replace(/\s+/g, ' ');
    card.classList.toggle('changed', text !== before);
    correct(clip, 'text', text && text !== before ? `--text ${quote(text)}` : '');
  };
  area.addEventListener('input', write);
  card.querySelector('[data-text]').addEventListener('click', event => { area.value = event.target.dataset.text; write(); });
  card.querySelector('[data-flag]').addEventListener('click', event => {
    const isPressed = event.target.getAttribute('aria-pressed') !== 'true';
    event.target.setAttribute('aria-pressed', isPressed);
    correct(clip, 'flag', isPressed ? event.target.dataset.flag : '');
  });
}
addEventListener('beforeunload', event => { if (!isCopied) event.preventDefault(); });
for (const button of document.querySelectorAll('.copy')) button.addEventListener('click', async () => {
  const text = document.getElementById(button.dataset.copy);
  getSelection().selectAllChildren(text);
  try { await navigator.clipboard.writeText(text.textContent); button.textContent = 'Copied'; } catch { button.textContent = 'Selected: copy with Ctrl+C'; }
  if (button.dataset.copy === 'commands') isCopied = true;
});
