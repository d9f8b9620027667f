// @ts-check

/**
 * Creates an SVG element.
 * @param {string} name
 * @param {Record<string, any>} attributes
 * @param {...(Node | string)} children
 * @returns {any}
 */
export function drawn(name, attributes, ...children) {
  const made = document.createElementNS("http://www.w3.org/2000/svg", name);
  for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
  made.append(...children);
  return made;
}
