// Recording from the microphone, as a WAV file: browsers record formats that the server does not read.

const RATE = 16000; // what models hear

// Begins to record. Returns a function that ends it and returns the file. Raises Error with what is wrong.
export async function record() {
  if (!navigator.mediaDevices) throw new Error("Browsers record only on pages with TLS, or of this machine.");
  let stream;
  try {
    stream = await navigator.mediaDevices.getUserMedia({ audio: true });
  } catch (error) {
    throw new Error({ NotAllowedError: "The browser does not allow the microphone.", NotFoundError: "There is no microphone." }[error.name] || error.message);
  }
  const recorder = new MediaRecorder(stream);
  const parts = [];
  recorder.addEventListener("dataavailable", (event) => parts.push(event.data));
  const ended = new Promise((resolve) => recorder.addEventListener("stop", resolve));
  recorder.start();
  return async () => {
    recorder.stop();
    await ended;
    for (const track of stream.getTracks()) track.stop();
    const heard = await new OfflineAudioContext(1, 1, RATE).decodeAudioData(await new Blob(parts).arrayBuffer());
    return new File([wav(heard.getChannelData(0))], "recording.wav", { type: "audio/wav" });
  };
}

// Returns a WAV file of 16-bit samples.
function wav(samples) {
  const view = new DataView(new ArrayBuffer(44 + 2 * samples.length));
  const text = (at, letters) => [...letters].forEach((letter, index) => view.setUint8(at + index, letter.charCodeAt(0)));
  text(0, "RIFF");
  view.setUint32(4, 36 + 2 * samples.length, true);
  text(8, "WAVEfmt ");
  view.setUint32(16, 16, true);
  view.setUint16(20, 1, true); // PCM
  view.setUint16(22, 1, true); // one channel
  view.setUint32(24, RATE, true);
  view.setUint32(28, 2 * RATE, true);
  view.setUint16(32, 2, true);
  view.setUint16(34, 16, true);
  text(36, "data");
  view.setUint32(40, 2 * samples.length, true);
  samples.forEach((sample, index) => view.setInt16(44 + 2 * index, Math.max(-1, Math.min(1, sample)) * 0x7fff, true));
  return view.buffer;
}
