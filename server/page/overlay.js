// Lines over an image: the grid of encoder rows, and the boxes that the model names.
import { svg } from "./dom.js";

/** Return columns and rows of an image's encoder rows, or null where they are not one grid. */
export function rowGrid(item) {
  const [frames, down, across] = item.grid;
  const merge = Math.sqrt((frames * down * across) / item.num_embeds);
  const grid = [across / merge, down / merge];
  return grid.every(Number.isInteger) ? grid : null;
}

/** Return the size in pixels of the image that the encoder saw, or null if it is not known. */
export function resizedSize(item, patchSize) {
  return Number.isInteger(patchSize) ? [item.grid[2] * patchSize, item.grid[1] * patchSize] : null;
}

/** Return an overlay in pixels of the original image. */
export function overlay(width, height, grid, boxes) {
  const drawing = svg("svg", { viewBox: `0 0 ${width} ${height}`, class: "overlay", "aria-hidden": "true" });
  if (grid) drawing.append(gridLines(width, height, grid));
  const size = Math.max(width, height) / 40;
  for (const { label, box, point } of boxes) {
    const [x, y] = box ?? point;
    if (box) drawing.append(svg("rect", { x, y, width: Math.max(0, box[2] - x), height: Math.max(0, box[3] - y), class: "box" }));
    else drawing.append(svg("circle", { cx: x, cy: y, r: size / 2, class: "box" }));
    drawing.append(svg("text", { x, y: Math.max(y - size / 4, size), "font-size": size, class: "box-label" }, label));
  }
  return drawing;
}

function gridLines(width, height, [columns, rows]) {
  const lines = svg("g", { class: "grid" });
  for (let i = 1; i < columns; i++) lines.append(line((i * width) / columns, 0, (i * width) / columns, height));
  for (let i = 1; i < rows; i++) lines.append(line(0, (i * height) / rows, width, (i * height) / rows));
  return lines;
}

const line = (x1, y1, x2, y2) => svg("line", { x1, y1, x2, y2 });
