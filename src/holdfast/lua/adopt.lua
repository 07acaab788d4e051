-- Take a hold over from its giver, who has let go of it: a new token, a new fence, a ttl of one's own.
--
-- KEYS 1 the lock   2 the last fence given out for this name
--      3 the tombstone of the new token
-- ARGV 1 the new token   2 ttl in ms   3 how long a fence is remembered after it was given out, in ms
--      4 the giver's token
--
-- Returns the fence   the hold is ours, whether it was the giver's or, sent twice, already ours
--         0           the key is gone
--         -1          it is another owner's
--         -2          this adoption was given up before this request arrived
--         error FENCELIMIT, FENCETYPE   see fence.lua
--
-- One step, because the lock must not be free for a moment between two owners, and must not be taken from anybody but
-- the giver. A lock that is free is not taken: whoever waits for it was there before.

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
  redis.call('DEL', KEYS[1]) -- first, for then this works on a full server too
  redis.call('SET', KEYS[1], ARGV[1], 'PX', ARGV[2])
elseif redis.call('PTTL', KEYS[1]) < tonumber(ARGV[2]) then
  redis.call('PEXPIRE', KEYS[1], ARGV[2])
end
return mint(last, '1', ARGV[3])
