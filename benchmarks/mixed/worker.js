// node worker.js LIBRARY FACE URL NAME HOLD_S COUNTER: as worker.py, for libraries of Node.js.
'use strict';

const Redis = require('ioredis');
const [library, , url, name, holdS, counter] = process.argv.slice(2);
const TTL_MS = 30000;

function opener(client) {
  if (library === 'node-redlock') {
    const Redlock = require('redlock');
    const redlock = new Redlock([client]);
    return async () => {
      const lock = await redlock.lock(name, TTL_MS);
      return () => lock.unlock();
    };
  }
  const { Mutex } = require('redis-semaphore');
  return async () => {
    const mutex = new Mutex(client, name);
    await mutex.acquire();
    return () => mutex.release();
  };
}

function say(what, ...more) {
  const seconds = Number(process.hrtime.bigint()) / 1e9; // the monotonic clock, as Python's
  process.stdout.write([what, seconds.toFixed(6), ...more].join(' ') + '\n');
}

async function main() {
  const RedisClient = Redis.Redis || Redis;
  const acquire = opener(new RedisClient(url));
  const plain = new RedisClient(url);
  for (;;) {
    say('ask');
    try {
      const release = await acquire();
      say('had', await plain.incr(counter));
      await new Promise((resolve) => setTimeout(resolve, Number(holdS) * 1000));
      await plain.decr(counter);
      await release();
      say('left');
    } catch (error) {
      say('threw', error.name);
    }
  }
}

main();
