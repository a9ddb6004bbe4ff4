"""Speech judged by what is heard: words, voice, quality. Ears of others, which are asked for when they are needed."""
