// The microphone as blocks of samples, and as a WAV file.

export const RATE = 24000; // of the blocks of worklet.js

export const hasMicrophone = () => Boolean(navigator.mediaDevices?.getUserMedia && window.AudioWorkletNode);

/** Return the level of a block of samples, from 0 to 1 on a scale of 60 dB. */
export function level(block) {
  const power = block.reduce((sum, value) => sum + value * value, 0) / (block.length * 32767 ** 2);
  return Math.max(0, Math.min(1, 1 + (10 * Math.log10(power || 1e-9)) / 60));
}

/** Record until `stop()`, which returns a WAV file. `onBlock` gets each block of samples. */
export async function record(onBlock = () => {}) {
  const stream = await navigator.mediaDevices.getUserMedia({ audio: true });
  const context = new AudioContext();
  const blocks = [];
  try {
    await context.audioWorklet.addModule("page/worklet.js");
  } catch (error) {
    end(stream, context);
    throw error;
  }
  const node = new AudioWorkletNode(context, "samples", { numberOfOutputs: 0 });
  node.port.onmessage = ({ data }) => {
    blocks.push(data);
    onBlock(data);
  };
  context.createMediaStreamSource(stream).connect(node);
  return {
    stop() {
      node.port.onmessage = null;
      end(stream, context);
      return new File([header(blocks), ...blocks], "speech.wav", { type: "audio/wav" });
    },
  };
}

function end(stream, context) {
  for (const track of stream.getTracks()) track.stop();
  context.close();
}

/** Return the header of a WAV file with mono samples of 16 bits. */
function header(blocks) {
  const bytes = blocks.reduce((sum, block) => sum + block.byteLength, 0);
  const view = new DataView(new ArrayBuffer(44));
  const text = (offset, value) => [...value].forEach((letter, i) => view.setUint8(offset + i, letter.charCodeAt(0)));
  const number = (offset, value) => view.setUint32(offset, value, true);
  text(0, "RIFF");
  number(4, bytes + 36);
  text(8, "WAVEfmt ");
  number(16, 16);
  number(20, 0x10001); // PCM, one channel
  number(24, RATE);
  number(28, 2 * RATE);
  number(32, 0x100002); // bytes and bits of a sample
  text(36, "data");
  number(40, bytes);
  return view.buffer;
}
