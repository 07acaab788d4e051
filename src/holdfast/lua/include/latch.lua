-- The state of a latch.
-- Several steps include this file. It uses no ARGV. Returns nothing itself. One step is the whole including file.
--
-- KEYS 1 the latch: the count that is left, and the initial count
--      2 its waiters: token and channel, by the time of their last request
--      3 the lock of this name, which must not exist
--      4 the queue and 5 the waiters of that lock, with the entries '' and 'kind' -> 'latch': these show other kinds of
--        lock that the name is a latch

-- The count that is left, the initial count, and whether the key exists; or nil and the reply, if the latch is
-- unusable.
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
  local kind = redis.call('HGET', KEYS[5], 'kind')
  if kind and kind ~= 'latch' then
    return nil, {-2, kind}
  end
  if redis.call('EXISTS', KEYS[3]) == 1 or (not kind and redis.call('EXISTS', KEYS[4]) == 1) then
    return nil, {-2, 'lock'}
  end
  return count, count, false
end

-- Write the latch. It lasts for ``ms`` from now, or longer if it lasts longer already. On a full server the first write
-- fails: then nothing was changed, and the error is returned.
local function write_latch(left, total, ms)
  local latch = left .. ' ' .. total
  ms = string.format('%.0f', math.max(ms, redis.call('PTTL', KEYS[1])))
  local written = redis.pcall('SET', KEYS[1], latch, 'PX', ms)
  if written.err then
    return written
  end
  redis.call('ZADD', KEYS[4], 0, '')
  redis.call('HSET', KEYS[5], 'kind', 'latch')
  redis.call('PEXPIRE', KEYS[4], ms)
  redis.call('PEXPIRE', KEYS[5], ms)
end
