-- Take a hold over from its giver: with a new token, a new fence and the new holder's ttl.
--
-- KEYS 1 the lock   2 the last fence given out for this name
--      3 the tombstone of the new token
-- ARGV 1 the new token   2 ttl in ms   3 retention of the fence in ms
--      4 the giver's token
--
-- Returns the fence   the hold is ours: it was the giver's, or the step was sent twice
--         0           the key is gone
--         -1          it is another owner's
--         -2          this adoption was abandoned before this request arrived
--         error FENCELIMIT, FENCETYPE   see fence.lua
--
-- One step, because the lock must never be free between the two owners, and must be taken from the giver only. A free lock
-- is not taken: its waiters come first.

-- include fence.lua

local owner = redis.call('GET', KEYS[1])
if owner ~= ARGV[1] and owner ~= ARGV[4] then
  return owner and -1 or 0
end
if redis.call('EXISTS', KEYS[3]) == 1 then
  return -2
end
read_time()
local last, refused = last_fence()
if refused then
  return refused
end
if owner == ARGV[4] then
  redis.call('DEL', KEYS[1]) -- free memory first, so the step works on a full server too
  redis.call('SET', KEYS[1], ARGV[1], 'PX', ARGV[2])
elseif redis.call('PTTL', KEYS[1]) < tonumber(ARGV[2]) then
  redis.call('PEXPIRE', KEYS[1], ARGV[2])
end
return mint(ARGV[1], last, '1', ARGV[3])
