// @ts-check
// The example from the articles: six words with three numbers each, projected to two numbers, without a mask.

const TOKENS = ["Your", "journey", "starts", "with", "one", "step"];
const INPUTS = [[0.43, 0.15, 0.89], [0.55, 0.87, 0.66], [0.57, 0.85, 0.64], [0.22, 0.58, 0.33], [0.77, 0.25, 0.1], [0.05, 0.8, 0.55]];
const QUERY = [[0.2961, 0.5166], [0.2517, 0.6886], [0.074, 0.8665]];
const KEY = [[0.1366, 0.1025], [0.1841, 0.7264], [0.3153, 0.6871]];
const VALUE = [[0.0756, 0.1966], [0.3164, 0.4017], [0.1186, 0.8274]];

/** @type {(values: number[]) => number} */
export const sum = values => values.reduce((total, value) => total + value, 0);
const times = (/** @type {number[]} */ row, /** @type {number[][]} */ matrix) =>
  matrix[0].map((_, column) => sum(row.map((value, n) => value * matrix[n][column])));

/**
 * Returns the example in the format of `look/head`, with the second word as the query.
 * @param {number} key
 * @returns {import("../types").HeadLook}
 */
export function example(key) {
  const q = times(INPUTS[1], QUERY), keys = INPUTS.map(row => times(row, KEY)), values = INPUTS.map(row => times(row, VALUE));
  const scale = 1 / Math.sqrt(q.length);
  const scores = keys.map(k => sum(k.map((value, n) => value * q[n])) * scale);
  const total = sum(scores.map(Math.exp)), weights = scores.map(score => Math.exp(score) / total);
  const products = keys[key].map((value, n) => value * q[n]);
  return {
    tokens: TOKENS, isUnmasked: true, query: 1, key, head_dim: q.length, scale, q, k: keys[key], products, score: sum(products), scaled: scores[key], scores, weights,
    v: values[key], context: q.map((_, n) => sum(values.map((value, token) => weights[token] * value[n]))),
  };
}
