// Boxes and points that models write in their answers, in pixels of the original image.

/** Models whose JSON has thousandths of the image; the others use pixels of the image as it was resized. */
const IN_THOUSANDTHS = /^Qwen(2VL|3)/;

/**
 * Return [{label, box: [left, top, right, bottom]} or {label, point: [x, y]}] of an answer.
 * `image`: {width, height, resized: [width, height] or null}.
 */
export function findBoxes(text, image, architecture) {
  return [...locations(text, image), ...points(text, image), ...jsonBoxes(text, image, architecture)];
}

/** PaliGemma: <loc0123><loc0456><loc0789><loc1000> label; top, left, bottom, right of 1024. */
function locations(text, { width, height }) {
  return [...text.matchAll(/((?:<loc\d{4}>){4})\s*([^;<\n]*)/g)].map(([, tokens, label]) => {
    const [top, left, bottom, right] = tokens.match(/\d{4}/g).map((digits) => Number(digits) / 1024);
    return { label: label.trim(), box: [left * width, top * height, right * width, bottom * height] };
  });
}

/** Molmo: <point x="12.3" y="45.6" alt="label">label</point>, or <points x1= y1= x2= ...>; percent of the image. */
function points(text, { width, height }) {
  const found = [];
  for (const [, attributes, label] of text.matchAll(/<points?\s([^>]*)>([^<]*)/g)) {
    const values = Object.fromEntries([...attributes.matchAll(/([xy]\d*)\s*=\s*"\s*([\d.]+)\s*"/g)].map(([, name, value]) => [name, Number(value)]));
    for (const name of Object.keys(values).filter((name) => name.startsWith("x"))) {
      const y = values[name.replace("x", "y")];
      if (y !== undefined) found.push({ label: label.trim(), point: [(values[name] * width) / 100, (y * height) / 100] });
    }
  }
  return found;
}

/** Qwen-VL: JSON objects with bbox_2d or point_2d, also while the answer still streams. */
function jsonBoxes(text, image, architecture) {
  const [scaleX, scaleY] = scale(image, architecture);
  const found = [];
  for (const [object] of text.matchAll(/\{[^{}]*\}/g)) {
    let value;
    try {
      value = JSON.parse(object);
    } catch {
      continue; // not JSON: text with braces
    }
    const label = String(value.label ?? value.text_content ?? "");
    const box = numbers(value.bbox_2d ?? value.bbox, 4);
    const point = numbers(value.point_2d ?? value.point, 2);
    if (box) found.push({ label, box: [box[0] * scaleX, box[1] * scaleY, box[2] * scaleX, box[3] * scaleY] });
    else if (point) found.push({ label, point: [point[0] * scaleX, point[1] * scaleY] });
  }
  return found;
}

function scale({ width, height, resized }, architecture) {
  const [across, down] = IN_THOUSANDTHS.test(architecture) ? [1000, 1000] : (resized ?? [width, height]);
  return [width / across, height / down];
}

function numbers(value, count) {
  return Array.isArray(value) && value.length === count && value.every(Number.isFinite) ? value : null;
}

/** Return what to ask so that the model answers with boxes. */
export function findPrompt(what, architecture) {
  if (architecture.startsWith("PaliGemma")) return `detect ${what}`;
  if (architecture.startsWith("Molmo")) return `Point to ${what}.`;
  return `Locate ${what} in the image. Output the bounding boxes as JSON: [{"bbox_2d": [x1, y1, x2, y2], "label": "..."}].`;
}
