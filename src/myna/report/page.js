// One sound at a time; a line runs over its picture, and a click there goes to that moment.
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
  sound.addEventListener('play', () => {
    for (const other of document.querySelectorAll('audio')) if (other !== sound) other.pause();
    line.hidden = false;
    draw();
  });
  sound.addEventListener('seeked', draw);
  picture.addEventListener('click', event => {
    const box = picture.getBoundingClientRect();
    sound.currentTime = (sound.duration || 0) * (event.clientX - box.left) / box.width;
    sound.play();
  });
}
