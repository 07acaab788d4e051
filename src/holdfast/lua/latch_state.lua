-- The state of a latch: what the steps that include this file share. It has no ARGV and Returns nothing of its own. One step
-- is always one whole file: the other, with this one in it.
--
-- KEYS, in every step: 1 the latch: what is left and what it began with
--                      2 its waiters: token and channel, by when they last asked
--                      3 the lock of this name, which must not be there
--                      4 the queue and 5 the waiters of that lock, by which whoever wants it as a lock finds that it is a
--                        latch: they hold '' and of what kind it is, as those of a room do

-- What is left, what it began with, and whether it is there already; or, if it cannot be used, nil and why.
local function read_latch(count)
  local latch = redis.call('GET', KEYS[1])
  if latch then
    local left, total = string.match(latch, '^(%d+) (%d+)$')
    if not total then
      return nil, {-2, 'foreign value'}
    end
    if total ~= count then
      return nil, {-1, tonumber(total)}
    end
    return left, total, true
  end
  local kind = string.match(redis.call('HGET', KEYS[5], '') or '', '^%a+$')
  if kind and kind ~= 'latch' then
    return nil, {-2, kind}
  end
  if redis.call('EXISTS', KEYS[3]) == 1 or (not kind and redis.call('EXISTS', KEYS[4]) == 1) then
    return nil, {-2, 'lock'}
  end
  return count, count, false
end

-- Write it down, for so long from now; or for longer, if somebody else has asked for that. On a full server the first
-- write fails, and then nothing was done.
local function write_latch(left, total, ms)
  local latch = left .. ' ' .. total
  ms = string.format('%.0f', math.max(ms, redis.call('PTTL', KEYS[1])))
  local written = redis.pcall('SET', KEYS[1], latch, 'PX', ms)
  if written.err then
    return written
  end
  redis.call('ZADD', KEYS[4], 0, '')
  redis.call('HSET', KEYS[5], '', 'latch')
  redis.call('PEXPIRE', KEYS[4], ms)
  redis.call('PEXPIRE', KEYS[5], ms)
end
