-- An operator frees a lock: end the hold that was inspected, raise the fence, and grant the lock to the next waiter.
--
-- KEYS 1 the lock   2 the last fence   3 the queue   4 its waiters   5 the history
--      6 the tombstone of the token; absent if another library made the token
-- ARGV 1 the start of the SHA-1 of the token   2 its fence ('': not compared)   3 retention of the fence in ms
--      4 the holder, the operator and the reason, for the history
--
-- Returns {1, fence, us}   broken at that time; the fence is greater than those of that holder, lower than all later ones
--         {0, 0, 0}        nothing was changed: the key is gone, is another owner's, or has another fence
--         {-1, 0, 0}       nothing was changed: no client holds the lock, it is only kept for a waiter
--         error FENCELIMIT, FENCETYPE   see fence.lua
--
-- One step, because between the check and the release another client can take the key; and because the fence must rise
-- before the next holder gets one. If the reply is lost, the step is sent again, and finds the tombstone. It frees before it
-- allocates, so it works on a full server too.

-- include fence.lua
-- include queue.lua
-- include grant.lua
-- include broken.lua

local owner = redis.call('GET', KEYS[1])
if not owner or string.sub(redis.sha1hex(owner), 1, #ARGV[1]) ~= ARGV[1] then
  return not_held()
elseif redis.call('ZSCORE', KEYS[3], owner) then
  return {-1, '0', '0'}
end
local last, refused = last_fence()
if refused then
  return refused
end
local first, count, tail = string.match(redis.call('GET', KEYS[2]) or '', '^(%d+) (%d%d?) (%S+)$')
local ours = first and string.sub(owner, -8) == tail
-- A holder that may pass the lock on within its process has several fences.
if ARGV[2] ~= '' and not (ours and ARGV[2] - first >= 0 and ARGV[2] - first < tonumber(count)) then
  return {0, '0', '0'}
end
read_time()
local lease_ms = redis.call('PTTL', KEYS[1])
local retention_ms = math.max(ARGV[3], redis.call('PTTL', KEYS[2]))
redis.call('DEL', KEYS[1])
local raised = mint('00000000', last, '1', string.format('%.0f', retention_ms)) -- no token ends in these digits
record(ours and first or '0', raised, ARGV[4], lease_ms)
if redis.call('EXISTS', KEYS[3]) == 1 then
  free_or_grant(first_waiter())
end
return {1, raised, now_us}
