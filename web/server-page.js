// @ts-check
// Entry point of a server's page.
import { start } from "./page.js";
import { server } from "./server.js";

start(server);
