-- Look a value up, and where it is missing or due, claim the right to compute it; or wait for whoever has that right.
--
-- KEYS 1 the entry   2 the claim   3 the waiters   4 the failure
--      5 the tombstone of this token
-- ARGV 1 token   2 ttl of a claim in ms
--      3 how early to refresh: by so many times what the value cost to compute (0: not before it is due)
--      4 the channel on which to be told of a value ('-' or '': none)
--      5 since when it has been waiting, by the time here in us (0: it has not)
--      6 how long a tombstone stands, in ms, if an earlier request with this token was not answered (0: all were)
--      7 the SHA-1 of a value that its caller cannot load, and which counts as missing ('': there is none)
--
-- Returns {1, value}              here it is; maybe old, while somebody else refreshes it
--         {2, now_us, value}      compute it; value is the old one, which may be served meanwhile, or nil
--         {0, ms, now_us}         somebody computes it; ms until the claim ends if its holder falls silent
--         {3, why, us}            the computation has failed while it was waiting, so many us ago; or (-1) not long
--                                 ago, and that is remembered
--         {-1}                    this token has had its claim before, or was given up
--
-- One step, because between a miss and a claim the value may have been stored, and would be computed twice; and because
-- whoever is told to wait must be known to the one who stores before that can happen. And because a request of unknown
-- outcome that comes after this one must find the claim, or the tombstone. On a full server what is there is still served.

-- include cache_bells.lua

read_time()
local entry = redis.pcall('HMGET', KEYS[1], 'value', 'fresh', 'cost')
if entry.err and not string.find(entry.err, 'WRONGTYPE', 1, true) then -- a key of another type is no value
  return entry
end
local value, fresh, cost = entry[1], tonumber(entry[2]), tonumber(entry[3])
if not (fresh and cost) or (value and ARGV[7] ~= '' and redis.sha1hex(value) == ARGV[7]) then
  value = false
end
if value and fresh - now > ARGV[3] * cost then
  return {1, value}
end

local failure = redis.call('GET', KEYS[4])
if failure then
  local at, till, why = string.match(failure, '^(%d+) (%d+) (.*)$')
  local waited = at and tonumber(ARGV[5]) > 0 and tonumber(at) > tonumber(ARGV[5])
  local remembered = at and tonumber(till) > now
  if waited or remembered then
    return value and {1, value} or {3, why, remembered and -1 or now - at}
  end
end

local owner = redis.call('GET', KEYS[2])
if not owner and redis.call('EXISTS', KEYS[5]) == 1 then
  return value and {1, value} or {-1}
end
if not owner or owner == ARGV[1] then
  local written = ARGV[6] ~= '0' and redis.pcall('SET', KEYS[5], '', 'PX', ARGV[6])
  if not owner and not (written and written.err) then
    written = redis.pcall('SET', KEYS[2], ARGV[1], 'PX', ARGV[2])
  elseif owner and redis.call('PTTL', KEYS[2]) < tonumber(ARGV[2]) then
    redis.call('PEXPIRE', KEYS[2], ARGV[2]) -- sent twice, or the reply was lost; never make it shorter
  end
  if written and written.err then
    return value and {1, value} or written
  end
  return {2, now, value}
end
if value then
  return {1, value}
end
if ARGV[4] ~= '' and ARGV[4] ~= '-' then
  -- By the key of the claim, not by token: this search may leave while another one of its process goes on waiting.
  redis.pcall('HSET', KEYS[3], ARGV[4], KEYS[2]) -- a full server refuses, and then it asks again by itself
  redis.call('PEXPIRE', KEYS[3], 5000)
end
return {0, redis.call('PTTL', KEYS[2]), now}
