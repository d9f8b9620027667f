// @ts-check

/**
 * An error with a message for the user.
 *
 * It carries the `status` of a response, `stopped` if the page itself ended the request, or `broke` if the
 * worker crashed.
 */
export class Failure extends Error {
  /** @param {string} message @param {Record<string, any>} [more] */
  constructor(message, more) {
    super(message);
    Object.assign(this, more);
  }
}
