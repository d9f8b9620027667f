// @ts-check
// Roles of attention heads in one text, measured from their patterns.
import { percentOf } from "./colors.js";
import { decode } from "./heatmap.js";

/**
 * Role of a head, its average fraction of attention, and the query and key of its strongest example.
 * @typedef {{ kind: string, share: number, row: number, column: number }} HeadRole
 */

// Roles from the most to the least interesting, each with the minimum fraction of attention that it requires
// and its description.
/** @type {[string, number, (share: string) => string][]} */
const ROLES = [
  ["induction", 0.2, share => `Where a token occurred before, ${share} of this head's attention goes to the token that followed it then`],
  ["duplicate", 0.35, share => `Where a token occurred before, ${share} of this head's attention goes to the earlier copy`],
  ["previous", 0.35, share => `${share} of this head's attention goes to the token just before`],
  ["self", 0.35, share => `${share} of this head's attention stays on the token itself`],
  ["first", 0.35, share => `${share} of this head's attention rests on the first token, where heads look when they have nothing to do`],
];
// Minimum ratio to the fraction of a head that divides its attention evenly.
const MORE = 3;

/**
 * Returns the keys that each query would attend to in a role.
 * @param {number[]} ids
 * @returns {Record<string, (row: number) => number[]>}
 */
function keysOf(ids) {
  const earlier = (/** @type {number} */ row) => [...Array(row).keys()].filter(at => ids[at] === ids[row]);
  return {
    // Attention to the preceding token belongs to another role.
    induction: row => earlier(row).map(at => at + 1).filter(at => at < row - 1),
    duplicate: row => earlier(row).filter(at => at < row - 1),
    previous: row => row > 1 ? [row - 1] : [],
    self: row => row > 0 ? [row] : [],
    first: row => row > 1 ? [0] : [],
  };
}

/**
 * Returns the role of each head of a pattern, in the pattern's order; `none` for a head without one.
 * @param {import("../types").Pattern} pattern
 * @param {number[]} ids the token ids of the text
 * @returns {HeadRole[]}
 */
export function headRoles(pattern, ids) {
  const size = ids.length, keys = keysOf(ids);
  const wanted = ROLES.map(([kind, least]) => ({ kind, least, rows: ids.map((_, row) => keys[kind](row)) }))
    .filter(({ kind, rows }) => rows.filter(one => one.length).length >= (kind === "first" || kind === "self" ? 3 : 2));
  return pattern.heads.map((head, n) => {
    const none = { kind: "none", share: 0, row: size - 1, column: 0 };
    if (head === null) return none;
    const values = decode(pattern, n, size);
    // Masked cells missing from a sparse pattern are NaN.
    const at = (/** @type {number} */ row, /** @type {number} */ column) => values[row * size + column] || 0;
    let best = none;
    for (const { kind, least, rows } of wanted) {
      let [sum, even, count, top, row, column] = [0, 0, 0, -1, 0, 0];
      rows.forEach((columns, query) => {
        if (!columns.length) return;
        count++;
        even += columns.length / (query + 1);
        for (const key of columns) {
          const weight = at(query, key);
          sum += weight;
          if (weight > top) [top, row, column] = [weight, query, key];
        }
      });
      const share = sum / count;
      if (share >= least && share >= MORE * even / count && share > best.share) best = { kind, share, row, column };
    }
    return best;
  });
}

/**
 * Returns the most interesting head: the clearest one of the rarest role.
 * @param {HeadRole[]} roles
 */
export function bestHead(roles) {
  for (const [kind] of ROLES) {
    const share = Math.max(0, ...roles.filter(role => role.kind === kind).map(role => role.share));
    if (share > 0) return roles.findIndex(role => role.kind === kind && role.share === share);
  }
  return 0;
}

/**
 * Describes a head's role in a sentence.
 * @param {HeadRole} role
 * @param {string[]} texts the tokens of the text
 */
export function roleInWords(role, texts) {
  if (role.kind === "none") return "This head divides its attention; no simple pattern explains it in this text.";
  const example = role.kind === "first" || role.kind === "self" ? "" : `, for example “${texts[role.row]}” at ${role.row} to “${texts[role.column]}” at ${role.column}`;
  const [, , words] = /** @type {(typeof ROLES)[0]} */ (ROLES.find(([kind]) => kind === role.kind));
  return `${words(percentOf(role.share))}${example}.`;
}
