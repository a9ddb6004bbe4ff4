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
