// Runs in the audio thread: sends blocks of mono samples, 16 bits each, at 24 kHz.
const RATE = 24000;
const BLOCK = 960;

class Samples extends AudioWorkletProcessor {
  block = new Int16Array(BLOCK);
  size = 0;
  sum = 0; // of the samples since the last one that was written
  count = 0;
  phase = 0;
  last = 0;

  process([channels]) {
    for (let i = 0; i < (channels[0]?.length ?? 0); i++) {
      this.sum += channels.reduce((sum, channel) => sum + channel[i], 0) / channels.length;
      this.count++;
      for (this.phase += RATE; this.phase >= sampleRate; this.phase -= sampleRate) this.write();
    }
    return true;
  }

  write() {
    if (this.count) this.last = this.sum / this.count;
    this.sum = this.count = 0;
    this.block[this.size++] = Math.round(Math.max(-1, Math.min(1, this.last)) * 32767);
    if (this.size < BLOCK) return;
    this.port.postMessage(this.block.slice());
    this.size = 0;
  }
}

registerProcessor("samples", Samples);
