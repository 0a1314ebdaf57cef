// Short names for what the program names most: the build puts them in place of the long ones (`inject` in build.js).

const { abs, ceil, floor, max, min, round, sqrt } = Math;
const { assign, entries, keys, values } = Object;
const { isFinite, isNaN } = Number;
const [Singles, Doubles] = [Float32Array, Float64Array];
export {
  abs as "Math.abs",
  ceil as "Math.ceil",
  floor as "Math.floor",
  max as "Math.max",
  min as "Math.min",
  round as "Math.round",
  sqrt as "Math.sqrt",
  assign as "Object.assign",
  entries as "Object.entries",
  keys as "Object.keys",
  values as "Object.values",
  isFinite as "Number.isFinite",
  isNaN as "Number.isNaN",
  Singles as "Float32Array",
  Doubles as "Float64Array",
};
