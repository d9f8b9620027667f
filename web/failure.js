// @ts-check

/** An error in a sentence, with the status of an answer, or `stopped` if the page itself ended it, or `broke` if the worker is gone. */
export class Failure extends Error {
  /** @param {string} message @param {Record<string, any>} [more] */
  constructor(message, more) {
    super(message);
    Object.assign(this, more);
  }
}
