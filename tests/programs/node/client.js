// Asks an HTTP server for each body, sends each, and checks every byte:
// node client.js HOST PORT FOLDER SECONDS
'use strict';
const fs = require('node:fs');
const http = require('node:http');
const path = require('node:path');

const [host, port, folder, seconds] = process.argv.slice(2);
const WORKERS = 4;
const bodies = fs.readdirSync(folder).filter((name) => name.startsWith('body-'))
  .map((name) => ({ name, content: fs.readFileSync(path.join(folder, name)) }));

function ask(agent, method, url, body) {
  return new Promise((resolve, reject) => {
    const request = http.request({ host, port, agent, method, path: url }, (answer) => {
      const parts = [];
      answer.on('data', (part) => parts.push(part));
      answer.on('error', reject);
      answer.on('end', () => {
        const right = answer.statusCode === 200 && Buffer.concat(parts).equals(body.content);
        return right ? resolve() : reject(new Error(`${method} ${url}: a wrong answer`));
      });
    });
    request.on('error', reject);
    request.end(method === 'POST' ? body.content : undefined);
  });
}

let answers = 0;
async function work() {
  const agent = new http.Agent({ keepAlive: true, maxSockets: 1 });
  const end = Date.now() + 1000 * Number(seconds);
  for (let turn = 0; turn < bodies.length || Date.now() < end; turn += 1) {
    const body = bodies[turn % bodies.length];
    await ask(agent, 'GET', `/${body.name}`, body);
    await ask(agent, 'POST', '/echo', body);
    answers += 2;
  }
  agent.destroy();
}

// A promise that is never kept leaves no work, and ends the program early.
process.exitCode = 1;
Promise.all(Array.from({ length: WORKERS }, work)).then(() => {
  console.log(answers);
  process.exitCode = 0;
}, (error) => {
  console.error(error);
  process.exit(1);
});
