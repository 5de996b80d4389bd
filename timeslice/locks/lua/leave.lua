--[[
A node leaves the group: its agent, which moved nothing, or an operator who knows that the node is gone.
ARGV  1 floor  2 node  3 who: 'agent', or the name of an operator
Reply ok | unknown
Events NodeLeft, and what advance and reap emit
--]]
-- @include group waiters residency lease advance
local node = ARGV[2]

begin(true)
if not redis.call('ZSCORE', nodes_key, node) then
  return { 'unknown' }
end
settle_clock()
hear(node)
redis.call('ZREM', nodes_key, node)
local jobs = {}
local flat = redis.call('HGETALL', members_key)
for i = 1, #flat, 2 do
  local owner, job = string.match(flat[i], '^([^/]+)/([^/]+)/')
  if owner == node then
    redis.call('HDEL', members_key, flat[i])
    jobs[job] = true
  end
end
if ARGV[3] ~= 'agent' then
  for job in pairs(jobs) do
    if job ~= '@' and job ~= S.job then
      job_recompute(job)
    end
  end
  for _, field in ipairs(redis.call('HKEYS', targets_key)) do
    if string.match(field, '^[^/]+/([^/]+)/') == node then
      redis.call('HDEL', targets_key, field)
    end
  end
end -- an agent that leaves takes no state with it: what it last told of its jobs holds until somebody looks again
emit('NodeLeft', 'node', node, 'by', ARGV[3])
set('changed_ms', now)
wake('members')
reap()
advance()
save()
return { 'ok' }
