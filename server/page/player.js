// A player of sound: a button, the place in the file, and the time.
import { element, icon } from "./dom.js";

/** Return the player of a file. Its `audio` element plays. */
export function player(url, name) {
  const audio = element("audio", { src: url, preload: "metadata" });
  const button = element("button", { type: "button", className: "plain" });
  const place = element("input", { type: "range", min: 0, max: 0, step: 0.01, value: 0, ariaLabel: `Place in ${name}` });
  const time = element("span", { className: "time" });
  const show = () => {
    button.replaceChildren(icon(audio.paused ? "play" : "pause"));
    button.ariaLabel = `${audio.paused ? "Play" : "Pause"} ${name}`;
    const length = Number.isFinite(audio.duration) ? audio.duration : 0;
    place.max = length;
    place.value = audio.currentTime;
    time.textContent = `${minutes(audio.currentTime)} / ${minutes(length)}`;
  };
  button.addEventListener("click", () => (audio.paused ? audio.play() : audio.pause()));
  place.addEventListener("input", () => (audio.currentTime = place.value));
  for (const event of ["loadedmetadata", "durationchange", "timeupdate", "play", "pause", "ended"]) audio.addEventListener(event, show);
  show();
  return element("div", { className: "player" }, audio, button, place, time);
}

export const minutes = (seconds) => `${Math.floor(seconds / 60)}:${String(Math.floor(seconds % 60)).padStart(2, "0")}`;
