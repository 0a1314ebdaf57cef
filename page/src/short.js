// Short names for what the program names most: the build puts them in place of the long ones (`inject` in build.js).

const { abs, ceil, floor, max, min, round, sqrt } = Math;
export {
  abs as "Math.abs",
  ceil as "Math.ceil",
  floor as "Math.floor",
  max as "Math.max",
  min as "Math.min",
  round as "Math.round",
  sqrt as "Math.sqrt",
};
