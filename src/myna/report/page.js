// One sound at a time.
document.addEventListener('play', event => {
  for (const other of document.querySelectorAll('audio')) if (other !== event.target) other.pause();
}, true);
// A line runs over the picture of a sound, and a click there goes to that moment.
for (const clip of document.querySelectorAll('.clip')) {
  const sound = clip.querySelector('audio'), picture = clip.querySelector('.picture');
  if (!sound || !picture) continue;
  const line = document.createElement('i');
  line.hidden = true;
  picture.append(line);
  const draw = () => {
    line.style.left = (100 * sound.currentTime / (sound.duration || 1)) + '%';
    if (!sound.paused) requestAnimationFrame(draw);
  };
  sound.addEventListener('play', () => { line.hidden = false; draw(); });
  sound.addEventListener('seeked', draw);
  picture.addEventListener('click', event => {
    const box = picture.getBoundingClientRect();
    sound.currentTime = (sound.duration || 0) * (event.clientX - box.left) / box.width;
    sound.play();
  });
}
// What scrolls sideways is reached by the keyboard too.
const scrolling = new ResizeObserver(entries => {
  for (const { target } of entries) {
    if (target.scrollWidth > target.clientWidth) target.tabIndex = 0; else target.removeAttribute('tabindex');
  }
});
for (const box of document.querySelectorAll('.wide, pre')) scrolling.observe(box);
// Blind listening. Answers stay in this browser, go to the server that gave the page if there is one, or into a file.
(() => {
  const source = document.getElementById('blind-data');
  if (!source) return;
  const data = JSON.parse(source.textContent), pairs = data.pairs, key = 'myna-compare/' + data.name;
  const box = document.getElementById('blind'), find = query => box.querySelector(query);
  const sides = [...box.querySelectorAll('.side')], choices = [...box.querySelectorAll('[data-action=choose]')];
  const players = [new Audio(), new Audio(), new Audio()], REAL = 2, served = location.protocol.startsWith('http');
  const help = document.getElementById('help'), status = find('#status'), result = find('#result');
  let state = { id: '', name: '', answers: {}, seen: false }, here = 0, last = 0, heard = [false, false];

  const two = number => number.toString(16).padStart(2, '0');
  const random = () => [...crypto.getRandomValues(new Uint8Array(12))].map(two).join('');
  const say = text => { status.textContent = text; };
  const pair = () => pairs[here], answer = one => state.answers[one.id];
  const unanswered = () => pairs.findIndex(one => !answer(one));
  const exported = () => ({ format: 'myna-preferences-1', listener: { id: state.id, name: state.name },
    answers: state.answers });

  function keep() {
    try { localStorage.setItem(key, JSON.stringify(state)); return ''; }
    catch (error) { return ' This browser keeps nothing: save the answers as a file before you leave.'; }
  }
  function restore() {
    try { state = { ...state, ...JSON.parse(localStorage.getItem(key) || '{}') }; }
    catch (error) { say('Earlier answers cannot be read: ' + error.message); }
    state.id = state.id || random();
  }
  async function send() {
    if (!served) return '';
    try {
      const body = JSON.stringify(exported()), headers = { 'Content-Type': 'application/json' };
      const reply = await fetch('preferences', { method: 'POST', headers, body });
      return reply.ok ? ' Saved.' : ' Not saved: ' + await reply.text();
    } catch (error) { return ' Not saved, the server is gone: save the answers as a file.'; }
  }

  function stop() { for (const player of players) player.pause(); }
  function play(number, from) {
    stop();
    if (!players[number].src) return;
    if (number !== REAL) last = number;
    if (from !== undefined) players[number].currentTime = from;
    players[number].play().catch(error => say('This browser does not play it: ' + error.message));
  }
  function space() {
    const next = heard.findIndex(done => !done);
    if (!players[last].paused) players[last].pause();
    else if (next >= 0) play(next, 0);
    else play(last, players[last].ended ? 0 : undefined);
  }
  function change() {
    const other = 1 - last, ratio = players[last].currentTime / (players[last].duration || 1);
    play(other, (players[last].ended ? 0 : ratio) * (players[other].duration || 0));
  }

  function show(number, focus) {
    stop();
    here = Math.max(0, Math.min(pairs.length - 1, number));
    const one = pair();
    [...one.sounds, one.real].forEach((name, place) => {
      const uri = name && data.sounds[name];
      if (uri) players[place].src = uri; else players[place].removeAttribute('src');
    });
    last = 0;
    // What cannot be played needs not be heard; who has answered has heard.
    heard = one.sounds.map(name => !data.sounds[name] || !!answer(one));
    find('#line').textContent = one.text;
    find('#line').lang = one.language;
    find('#about').textContent = one.note;
    find('#where').textContent = 'Pair ' + (here + 1) + ' of ' + pairs.length;
    find('[data-action=real]').hidden = !one.real;
    draw();
    if (focus) find('#line').focus({ preventScroll: true });
  }
  function draw() {
    const one = pair(), mine = answer(one), done = pairs.filter(answer).length;
    find('progress').value = done;
    find('progress').textContent = done + ' of ' + pairs.length;
    sides.forEach((side, place) => {
      const silent = !data.sounds[one.sounds[place]];
      side.querySelector('.who').textContent = state.seen ? one.names[place] : '';
      side.querySelector('button').disabled = silent;
      side.querySelector('.heard').textContent = silent ? 'nothing to hear: it ended at once'
        : heard[place] ? 'heard' : 'not heard yet';
    });
    for (const button of choices) {
      const choice = button.dataset.choice === 'tie' ? 'tie' : one.sounds[button.dataset.choice];
      button.setAttribute('aria-pressed', String(!!mine && mine.choice === choice));
      button.disabled = state.seen || heard.includes(false);
    }
    find('[data-action=back]').disabled = here === 0;
    find('[data-action=next]').disabled = here === pairs.length - 1;
    find('[data-action=reveal]').disabled = state.seen || done === 0;
    find('[data-action=download]').disabled = done === 0;
  }
  async function choose(which) {
    if (state.seen) return say('The names are known; no more answers are taken.');
    if (heard.includes(false)) return say('Listen to both first.');
    const said = { 0: 'A is better.', 1: 'B is better.', tie: 'No difference.' }[which];
    state.answers[pair().id] = { choice: which === 'tie' ? 'tie' : pair().sounds[which], at: new Date().toISOString() };
    const trouble = keep();
    const next = pairs.findIndex((one, place) => place > here && !answer(one));
    const to = next >= 0 ? next : unanswered();
    if (to >= 0) show(to, true); else draw();
    const rest = to >= 0 ? ' Pair ' + (to + 1) + ' of ' + pairs.length + '.' : ' All pairs are answered.';
    say(said + rest + trouble);
    say(said + rest + trouble + await send());
  }

  const percent = share => Math.round(100 * share) + ' %';
  function counts() {
    const found = new Map();
    for (const one of pairs) {
      const names = [...one.names].sort(), label = names.join('\n');
      if (!found.has(label)) found.set(label, { names, wins: [0, 0], ties: 0 });
      const mine = answer(one), count = found.get(label);
      if (!mine) continue;
      if (mine.choice === 'tie') count.ties += 1;
      else count.wins[names.indexOf(one.names[one.sounds.indexOf(mine.choice)])] += 1;
    }
    return [...found.values()];
  }
  function tell({ names, wins, ties }) {
    const decided = wins[0] + wins[1], first = wins[0] >= wins[1] ? 0 : 1, won = wins[first];
    const tied = ties ? ', ' + ties + ' without a difference' : '';
    if (!decided) return names.join(' and ') + ': no line decided' + tied + '.';
    const lows = data.intervals[decided], low = lows[won], high = 1 - lows[decided - won];
    const verdict = low > 0.5 ? 'you prefer ' + names[first] : 'no preference can be told';
    return names.join(' and ') + ': ' + names[first] + ' was better in ' + won + ' of ' + decided + ' lines ('
      + percent(won / decided) + ', ' + percent(data.level) + ' interval ' + percent(low) + ' to ' + percent(high) + ')'
      + tied + '; ' + verdict + '.';
  }
  function reveal() {
    const left = pairs.filter(one => !answer(one)).length;
    const warning = left + ' pairs are not answered. When names are shown, no more answers are taken. Show them?';
    if (left && !confirm(warning)) return;
    state.seen = true;
    keep();
    draw();
    results();
    result.focus();
  }
  function results() {
    result.replaceChildren();
    const add = (name, text) => {
      const made = document.createElement(name);
      made.textContent = text;
      result.append(made);
    };
    add('h3', 'Who is who');
    for (const count of counts()) add('p', tell(count));
    add('p', 'Go through the pairs to see the names. Save the answers as a file, so that several listeners add up.');
    result.hidden = false;
  }
  function download() {
    const link = document.createElement('a'), name = (state.name || 'listener').replace(/[^\p{L}\p{N}]+/gu, '-');
    link.href = URL.createObjectURL(new Blob([JSON.stringify(exported(), null, 2)], { type: 'application/json' }));
    link.download = 'preferences-' + name + '.json';
    link.click();
    URL.revokeObjectURL(link.href);
    say('Saved as ' + link.download + '.');
  }

  const actions = { help: () => help.showModal(), close: () => help.close(), real: () => play(REAL, 0),
    back: () => show(here - 1, true), next: () => show(here + 1, true), reveal, download };
  box.addEventListener('click', event => act(event.target.closest('button')));
  help.addEventListener('click', event => act(event.target.closest('button')));
  function act(button) {
    if (!button) return;
    const action = button.dataset.action;
    if (action === 'play') play(sides.indexOf(button.closest('.side')), 0);
    else if (action === 'choose') choose(button.dataset.choice);
    else actions[action]();
  }
  const keys = { ' ': space, 1: () => play(0, 0), 2: () => play(1, 0), x: change, r: () => play(REAL, 0),
    a: () => choose('0'), b: () => choose('1'), '=': () => choose('tie'), t: () => choose('tie'),
    arrowleft: actions.back, arrowright: actions.next, '?': actions.help };
  document.addEventListener('keydown', event => {
    const pressed = event.key.toLowerCase(), target = event.target;
    if (event.ctrlKey || event.altKey || event.metaKey || help.open || !find('#keys').checked) return;
    if (target.matches('input[type=text], textarea, select, audio')) return;
    if (pressed === ' ' && target.matches('button, input, summary, a')) return;
    if (!(pressed in keys)) return;
    event.preventDefault();
    keys[pressed]();
  });
  players.forEach((player, place) => {
    const side = sides[place], bar = side && side.querySelector('.meter i');
    const move = () => {
      if (bar) bar.style.width = (100 * player.currentTime / (player.duration || 1)) + '%';
      if (!player.paused) requestAnimationFrame(move);
    };
    player.addEventListener('play', () => {
      if (!side) return;
      side.classList.add('playing');
      heard[place] = true;
      draw();
      move();
    });
    for (const ending of ['pause', 'ended', 'emptied'])
      player.addEventListener(ending, () => { if (side) { side.classList.remove('playing'); move(); } });
  });
  find('#listener').addEventListener('input', event => { state.name = event.target.value.slice(0, 100); keep(); });

  restore();
  find('#listener').value = state.name;
  show(Math.max(0, unanswered()), false);
  if (state.seen) results();
})();
